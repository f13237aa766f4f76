"""The tokenizer: the text rule, ids read from the model, bytes for rare characters, and repeatable training."""

import io
import pickle
import subprocess
import sys
import unicodedata

import pytest
import sentencepiece

from transformer_jax.data.text import is_blank
from transformer_jax.data.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID, Tokenizer
from transformer_jax.errors import UserError

LINES = [f"The file number {i} is saved in folder {i % 7}; größer, naïve café." for i in range(50)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.train(LINES, tmp_path_factory.mktemp("tokenizer") / "tokenizer.model", vocab_size=400)


def foreign_model(pad, unk, bos, eos):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, vocab_size=400, model_type="bpe", hard_vocab_limit=False,
        byte_fallback=True, pad_id=pad, unk_id=unk, bos_id=bos, eos_id=eos, minloglevel=2,
    )  # fmt: skip
    return model.getvalue()


def round_trip(tokenizer, text):
    return tokenizer.decode(tokenizer.encode([text]))[0]


def test_ids_and_round_trip(tokenizer):
    assert tokenizer.pieces([PAD_ID, EOS_ID, BOS_ID, UNK_ID]) == ["<pad>", "</s>", "<s>", "<unk>"]
    ids = tokenizer.encode([*LINES, ""])
    assert len(ids) == 51
    assert all(row[-1] == 1 and 0 not in row and 2 not in row and 3 not in row for row in ids)
    assert ids[-1] == [1]
    assert tokenizer.decode(ids) == [*LINES, ""]
    assert "".join(tokenizer.pieces(ids[0])).replace("▁", " ") == f" {LINES[0]}</s>"
    assert tokenizer.encode([]) == [] and tokenizer.decode([]) == [] and tokenizer.decode([[]]) == [""]
    assert tokenizer.encode(LINES, num_threads=1) == ids[:-1]


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_same_text_same_bytes_on_every_run(tmp_path, model_type):
    digests = [
        Tokenizer.train(LINES, tmp_path / name, vocab_size=320, model_type=model_type).digest for name in ("a", "b")
    ]
    program = (
        "import sys; from transformer_jax.data.tokenizer import Tokenizer; "
        f"print(Tokenizer.train({LINES!r}, sys.argv[1], vocab_size=320, model_type={model_type!r}).digest)"
    )
    other = subprocess.run([sys.executable, "-c", program, tmp_path / "c"], capture_output=True, text=True, check=True)
    assert [*digests, other.stdout.strip()] == [digests[0]] * 3
    assert (tmp_path / "a").read_bytes() == (tmp_path / "c").read_bytes()
    assert b"rule.tsv" not in (tmp_path / "a").read_bytes(), "the model names a path of this machine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"], "unfinished files are left"
    assert other.stderr == ""
    assert Tokenizer.train(LINES[1:], tmp_path / "d", vocab_size=320, model_type=model_type).digest != digests[0]


def test_a_sample_is_drawn_the_same_way(tmp_path):
    lines = [f"{i * 7919 % 1000} word{i}" for i in range(1000)]
    first, second, all_lines = (
        Tokenizer.train(lines, tmp_path / name, vocab_size=350, max_sentences=count)
        for name, count in (("a", 120), ("b", 120), ("c", 1000))
    )
    assert first.digest == second.digest != all_lines.digest


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_a_small_corpus_gives_fewer_pieces_and_the_real_count(tmp_path, model_type):
    """V1: 50 short sentences and size 8000 train without a word of complaint."""
    tokenizer = Tokenizer.train(LINES, tmp_path / "m", vocab_size=8000, model_type=model_type)
    assert 260 < tokenizer.size < 1000
    assert max(max(row) for row in tokenizer.encode(LINES)) < tokenizer.size
    assert tokenizer.decode(tokenizer.encode(LINES)) == LINES


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_too_small_a_vocabulary_is_refused_with_the_smallest_that_works(tmp_path, model_type):
    """V1: size 10."""
    with pytest.raises(UserError, match=r"data\.vocab_size is 10, but this text needs at least \d+:") as caught:
        Tokenizer.train(LINES, tmp_path / "m", vocab_size=10, model_type=model_type)
    smallest = int(str(caught.value).split("at least ")[1].split(":")[0])
    with pytest.raises(UserError, match=f"at least {smallest}"):
        Tokenizer.train(LINES, tmp_path / "m", vocab_size=smallest - 1, model_type=model_type)
    assert not (tmp_path / "m").exists()
    assert Tokenizer.train(LINES, tmp_path / "m", vocab_size=smallest, model_type=model_type).size == smallest


@pytest.mark.parametrize("lines", [[], ["", "  ", "\u200b", "\0"]])
def test_text_without_text_is_refused(tmp_path, lines):
    with pytest.raises(UserError, match="only blank lines"):
        Tokenizer.train(lines, tmp_path / "m", vocab_size=300)


def test_a_fault_in_the_text_is_reported_as_itself(tmp_path):
    """SentencePiece would turn it into its own INTERNAL error, or learn from the part before it."""

    def lines(count):
        yield from LINES[:count]
        raise UserError(f"corpus.txt, line {count + 1}: byte 1 (0xff) is not UTF-8")

    for count in (0, 50):
        with pytest.raises(UserError, match=rf"corpus\.txt, line {count + 1}:"):
            Tokenizer.train(lines(count), tmp_path / "m", vocab_size=400)
    assert not (tmp_path / "m").exists()


def test_long_lines_are_learnt_from(tmp_path):
    """SentencePiece's own limit of 4192 bytes would leave nothing of this corpus."""
    assert Tokenizer.train(["abcd " * 2000] * 3, tmp_path / "m", vocab_size=300).size > 260


def test_ids_are_read_from_the_model(tmp_path):
    """V2: wherever a model has its control ids, they are read from it, and its pieces get our numbers."""
    tokenizers = []
    for name, ids in (("a", (0, 1, 2, 3)), ("b", (3, 0, 1, 2))):
        (tmp_path / name).write_bytes(foreign_model(*ids))
        tokenizers.append(Tokenizer.load(tmp_path / name))
    text = "The file <s> in folder 0"
    rows = [t.encode([text])[0] for t in tokenizers]
    assert rows[0] == rows[1]
    assert rows[0][-1] == EOS_ID and PAD_ID not in rows[0]
    assert tokenizers[0].pieces(rows[0]) == tokenizers[1].pieces(rows[1])
    assert tokenizers[1].pieces([PAD_ID, EOS_ID, BOS_ID, UNK_ID]) == ["<pad>", "</s>", "<s>", "<unk>"]
    assert [t.decode([[BOS_ID, *row, PAD_ID]]) for t, row in zip(tokenizers, rows, strict=True)] == [[text]] * 2


@pytest.mark.parametrize(("ids", "kind"), [((-1, 0, 1, 2), "pad"), ((3, 0, -1, 2), "bos"), ((3, 0, 1, -1), "eos")])
def test_models_without_a_needed_id_are_refused(tmp_path, ids, kind):
    """V2: SentencePiece's default model has no padding at all."""
    (tmp_path / "foreign.model").write_bytes(foreign_model(*ids))
    with pytest.raises(UserError, match=rf"foreign\.model: has no {kind} id"):
        Tokenizer.load(tmp_path / "foreign.model")


def test_what_is_no_model_is_refused(tmp_path, tokenizer):
    tokenizer.save(tmp_path / "whole")
    for name, data in (("text", b"hello"), ("empty", b""), ("cut", (tmp_path / "whole").read_bytes()[:3000])):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=f"{name}: not a SentencePiece model"):
            Tokenizer.load(tmp_path / name)
    with pytest.raises(UserError, match="missing: tokenizer cannot be read"):
        Tokenizer.load(tmp_path / "missing")


@pytest.mark.parametrize("text", ["a 😀 b", "unseen 漢字 \u1e9e", "日本語", "👩\u200d👩\u200d👧", "می\u200cخواهم"])
def test_unseen_characters_come_back_whole(tokenizer, text):
    """V4, T8: bytes are joined to characters; joiners, which have meaning, survive."""
    assert round_trip(tokenizer, text) == text


def test_a_cut_character_is_a_replacement_character(tokenizer):
    """V4: an output that ends inside a character is valid text."""
    ids = tokenizer.encode(["ab 😀"])[0]
    text = tokenizer.decode([ids[:-3]])[0]
    assert text.startswith("ab ") and text.endswith("\ufffd")
    assert "<0x" not in text


def test_control_symbols_in_text_are_text(tokenizer):
    """T9: nothing a user types becomes a control id, and no control id is ever printed."""
    line = "stop </s> here <pad> <unk> <s> end <0x41>"
    ids = tokenizer.encode([line])[0]
    assert not {0, 1, 2, 3} & set(ids[:-1])
    assert tokenizer.decode([ids]) == [line]
    assert tokenizer.decode([[2, *ids, 0, 0, tokenizer.size, tokenizer.size + 7, -1]]) == [line]


def test_control_symbols_in_training_text_clash_with_nothing(tmp_path):
    """T9: as a training target."""
    tokenizer = Tokenizer.train(["stop </s> here <pad> <unk> <s> end"] * 20, tmp_path / "m", vocab_size=400)
    assert tokenizer.pieces([PAD_ID, EOS_ID, BOS_ID, UNK_ID]) == ["<pad>", "</s>", "<s>", "<unk>"]
    ids = tokenizer.encode(["stop </s> here <pad> <unk> <s> end"])[0]
    assert not {0, 1, 2, 3} & set(ids[:-1])
    assert round_trip(tokenizer, "<s> </s>") == "<s> </s>"


@pytest.mark.parametrize("text", ["größer naïve café", "ệ ǖ ᾂ 각", "e\u0331\u0302", "Å Ω"])
def test_composed_and_decomposed_accents_are_the_same_text(tokenizer, text):
    """T8."""
    forms = [unicodedata.normalize(form, text) for form in ("NFC", "NFD")]
    ids = tokenizer.encode(forms)
    assert ids[0] == ids[1]
    assert tokenizer.decode(ids) == [forms[0]] * 2


def test_compatibility_characters_stay_as_they_are(tokenizer):
    """T8: NFKC would write the Chinese comma, the ligature and the fraction in other characters."""
    text = "你好，世界！ ﬁ ½ … Ａ"
    assert round_trip(tokenizer, text) == text


@pytest.mark.parametrize(
    "space", ["\t", "\u00a0", "\u3000", "\u2028", "\x85", "\x0b", "\r", "\n", "\0", "\u200b", "  "]
)
def test_every_kind_of_space_is_a_space(tokenizer, space):
    """T3, T5, T6: the same ids, and nothing in the output that could end a line."""
    ids = tokenizer.encode([f"The{space}file", "The file"])
    assert ids[0] == ids[1]
    assert tokenizer.decode(ids) == ["The file"] * 2


@pytest.mark.parametrize("char", ["\ufeff", "\u00ad", "\x01", "\x7f", "\u200e", "\u202b", "\u2060"])
def test_invisible_characters_without_meaning_are_dropped(tokenizer, char):
    """T5, T8: a byte order mark or a soft hyphen never splits a word in pieces of its own."""
    ids = tokenizer.encode([f"{char}The fi{char}le", "The file"])
    assert ids[0] == ids[1]


def test_training_text_follows_the_same_rule(tmp_path):
    """T5, T6, T8: NUL, BOM, CR, tabs and decomposed accents leave no trace in the vocabulary."""
    dirty = [unicodedata.normalize("NFD", f"\ufeff{line}\r").replace(" ", "\t\0", 1) for line in LINES]
    assert (
        Tokenizer.train(dirty, tmp_path / "dirty", vocab_size=400).digest
        == Tokenizer.train(LINES, tmp_path / "clean", vocab_size=400).digest
    )


def test_what_encodes_to_nothing_is_blank(tokenizer):
    """T1: a source of no pieces would get an invented translation, so `is_blank` must know every such character."""
    chars = [chr(code) for code in (*range(0xD800), *range(0xE000, 0x20000))]
    empty = [char for char, ids in zip(chars, tokenizer.encode(chars), strict=True) if len(ids) == 1]
    assert len(empty) > 90
    assert [hex(ord(char)) for char in empty if not is_blank(char)] == []


def test_bytes_that_spell_line_ends_are_spaces_in_the_output(tokenizer):
    """T11: an output line is one line, whatever the model writes."""
    ids = [4 + byte for byte in b"a\nb\rc\0d\xe2\x80\xa8e\xc2\x85f"]
    assert tokenizer.pieces(ids)[1] == "<0x0A>"
    assert tokenizer.decode([ids]) == ["a b c d e f"]


def test_half_a_surrogate_pair_is_refused(tokenizer):
    with pytest.raises(UserError, match="line 2: holds half a surrogate pair"):
        tokenizer.encode(["fine", "not \ud800 fine"])


def test_saving_and_pickling_keep_the_bytes(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "new" / "folder" / "tokenizer.model")
    for other in (
        Tokenizer.load(tmp_path / "new" / "folder" / "tokenizer.model"),
        pickle.loads(pickle.dumps(tokenizer)),
    ):
        assert other.digest == tokenizer.digest
        assert other.encode(LINES[:1]) == tokenizer.encode(LINES[:1])
    with pytest.raises(UserError, match="cannot be written"):
        tokenizer.save(tmp_path / "new" / "folder" / "tokenizer.model" / "below_a_file")
