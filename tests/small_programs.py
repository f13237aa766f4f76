"""A short program in the text of TPU programs: a loop that reads, exchanges and writes one layer of a stack a turn."""

TPU_HEAD = "HloModule m, is_scheduled=true\n\n"

LOOP = (
    TPU_HEAD
    + """%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%slice_one (p0: f32[6,64,128], p1: s32[]) -> f32[1,64,128] {
  %p0 = f32[6,64,128]{2,1,0:T(8,128)} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %ds = f32[1,64,128]{2,1,0:T(8,128)} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,64,128}
}

%body (state: (s32[], f32[6,64,128])) -> (s32[], f32[6,64,128]) {
  %state = (s32[]{:T(128)}, f32[6,64,128]{2,1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %xs = f32[6,64,128]{2,1,0:T(8,128)} get-tuple-element(%state), index=1
  %x = f32[1,64,128]{2,1,0:T(8,128)} fusion(%xs, %i), kind=kLoop, calls=%slice_one
  %start = f32[1,64,128]{2,1,0:T(8,128)} all-reduce-start(%x), replica_groups=[2,4]<=[8], to_apply=%add
  %work = f32[1,64,128]{2,1,0:T(8,128)} negate(%x)
  %done = f32[1,64,128]{2,1,0:T(8,128)} all-reduce-done(%start)
  %zero.1 = s32[]{:T(128)} constant(0)
  %ys = f32[6,64,128]{2,1,0:T(8,128)} dynamic-update-slice(%xs, %done, %i, %zero.1, %zero.1)
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)S(6)} add(%i, %one)
  ROOT %t = (s32[]{:T(128)}, f32[6,64,128]{2,1,0:T(8,128)}) tuple(%next, %ys)
}

%cond (state.1: (s32[], f32[6,64,128])) -> pred[] {
  %limit = s32[]{:T(128)} constant(6)
  %state.1 = (s32[]{:T(128)}, f32[6,64,128]{2,1,0:T(8,128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i.1, %limit), direction=LT
}

ENTRY %main (p: f32[6,64,128]) -> (s32[], f32[6,64,128]) {
  %p = f32[6,64,128]{2,1,0:T(8,128)} parameter(0)
  %first = s32[]{:T(128)} constant(2)
  %init = (s32[]{:T(128)}, f32[6,64,128]{2,1,0:T(8,128)}) tuple(%first, %p)
  ROOT %w = (s32[]{:T(128)}, /*index=1*/f32[6,64,128]{2,1,0:T(8,128)}) while(%init), condition=%cond, body=%body
}
"""
)
ROW_BYTES = 64 * 128 * 4
