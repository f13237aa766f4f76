"""Frozen configurations with the paper's symbols. The defaults are the paper's base model (sections 3 and 5).

A configuration is a value: change it with `dataclasses.replace`, or from outside with
`transformer_jax.config_loading.load_config(path, overrides)`.
Every class checks itself when it is built and raises `UserError` with the field's name.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Literal

from transformer_jax.config_checks import require, require_float32, require_fraction, require_positive
from transformer_jax.config_fields import build, check_types
from transformer_jax.errors import UserError


@dataclass(frozen=True)
class ModelConfig:
    """The Transformer of section 3."""

    vocab_size: int | None = None
    """Rows of the embedding (W). None: as many as the tokenizer has pieces."""
    encoder_layers: int = 6
    """Encoder layers (N)."""
    decoder_layers: int = 6
    """Decoder layers (N)."""
    d_model: int = 512
    """Width of the residual stream (D)."""
    d_ff: int = 2048
    """Width of the feed-forward layer (F)."""
    num_heads: int = 8
    """Attention heads (h)."""
    d_k: int | None = None
    """Width of queries and keys in each head. None: d_model / num_heads."""
    d_v: int | None = None
    """Width of values in each head. None: d_model / num_heads."""
    dropout: float = 0.1
    """P_drop: on each sub-layer's output and on embedding + position (section 5.4)."""
    attention_dropout: float = 0.0
    """Dropout on attention weights (later tensor2tensor: 0.1)."""
    relu_dropout: float = 0.0
    """Dropout inside the feed-forward layer (later tensor2tensor: 0.1)."""
    norm: Literal["post", "pre"] = "post"
    """post: LayerNorm(x + Sublayer(x)), the paper. pre: x + Sublayer(LayerNorm(x)) and a final norm on each stack."""
    norm_epsilon: float = 1e-6
    """Added to the variance in LayerNorm."""
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    """Section 3.5, or Table 3 row E."""
    sinusoids: Literal["interleaved", "concatenated"] = "interleaved"
    """interleaved: sin and cos alternate (the paper). concatenated: all sines, then all cosines (tensor2tensor)."""
    max_positions: int = 1024
    """Rows of each learned position table; sinusoids need none and have no limit."""
    tied_embeddings: bool = True
    """One matrix for source, target and output (section 3.4), or three."""
    attention_bias: bool = True
    """Biases in the attention projections (the paper's parameter counts need them)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype. Parameters, softmax, norm statistics, loss and optimizer stay float32."""
    scan_layers: bool = True
    """Roll each stack into one scanned layer (compile time does not grow with N); False unrolls it."""
    attention_impl: Literal["einsum", "fused"] = "einsum"
    """einsum: three products and a softmax, as section 3.2 writes them. fused: jax.nn.dot_product_attention, which
    is cuDNN's flash attention on a GPU (bfloat16, even lengths, d_k up to 128), einsums elsewhere and while
    decoding from a cache; it needs d_k = d_v and attention_dropout 0."""
    remat: Literal["none", "dots", "full"] = "none"
    """What the backward pass recomputes per layer: nothing, all but matrix products, everything. On a CPU it saves
    memory with scan_layers only."""

    def __post_init__(self) -> None:
        check_types(self, "model.")
        require_positive(
            "model", self, "vocab_size", "encoder_layers", "decoder_layers", "d_model", "d_ff", "num_heads", "d_k",
            "d_v", "max_positions",
        )  # fmt: skip
        require_fraction("model", self, "dropout", "attention_dropout", "relu_dropout")
        require_float32("model", self, "norm_epsilon")
        require(
            self.positions == "learned" or self.d_model % 2 == 0,
            "model.d_model",
            self.d_model,
            "even for sinusoidal positions (one sine and one cosine for each frequency)",
        )
        require(
            self.d_model % self.num_heads == 0 or (self.d_k is not None and self.d_v is not None),
            "model.d_model",
            self.d_model,
            f"divisible by num_heads {self.num_heads}, unless d_k and d_v are both given",
        )
        require(
            self.attention_impl == "einsum" or (self.key_size == self.value_size and not self.attention_dropout),
            "model.attention_impl",
            self.attention_impl,
            "einsum where d_k is not d_v or attention_dropout is not 0",
        )

    @property
    def embedding_rows(self) -> int:
        """vocab_size (W), once it is known.

        Raises:
            UserError: it is still None.
        """
        if self.vocab_size is None:
            raise UserError("model.vocab_size is None: set it to the number of the tokenizer's pieces")
        return self.vocab_size

    @property
    def key_size(self) -> int:
        """d_k, or its default d_model / num_heads (K)."""
        return self.d_k if self.d_k is not None else self.d_model // self.num_heads

    @property
    def value_size(self) -> int:
        """d_v, or its default d_model / num_heads (V)."""
        return self.d_v if self.d_v is not None else self.d_model // self.num_heads


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam and its schedule (section 5.3)."""

    beta1: float = 0.9
    """Adam's beta1."""
    beta2: float = 0.98
    """Adam's beta2."""
    epsilon: float = 1e-9
    """Adam's epsilon."""
    learning_rate: float | None = None
    """Peak learning rate. None: learning_rate_factor * d_model^-0.5 * warmup_steps^-0.5, the paper's."""
    learning_rate_factor: float = 1.0
    """Multiplies the paper's learning rate; unused when learning_rate is given."""
    warmup_steps: int = 4000
    """Updates of linear warm-up; the peak is reached at this update. The first update is step 1, its rate is not 0."""
    decay: Literal["inverse_sqrt", "linear"] = "inverse_sqrt"
    """After the peak: with step^-0.5 (the paper), or linearly to 0 at train.steps."""
    clip_norm: float | None = None
    """Gradients with a larger global norm are scaled down to it. None (the paper): they are taken as they are."""
    ema_decay: float | None = None
    """Decay of an exponential moving average of the parameters, which is then what is validated, scored and
    translated with. None (the paper): there is none, checkpoints are averaged instead."""

    def __post_init__(self) -> None:
        check_types(self, "optimizer.")
        require_fraction("optimizer", self, "beta1", "beta2")
        require_float32("optimizer", self, "epsilon", "learning_rate", "learning_rate_factor", "clip_norm")
        require(
            self.ema_decay is None or 0.0 < self.ema_decay < 1.0,
            "optimizer.ema_decay",
            self.ema_decay,
            "above 0 and below 1",
        )
        require(
            self.learning_rate is None or self.learning_rate > 0,
            "optimizer.learning_rate",
            self.learning_rate,
            "above 0",
        )
        require(self.learning_rate_factor > 0, "optimizer.learning_rate_factor", self.learning_rate_factor, "above 0")
        require(self.warmup_steps >= 0, "optimizer.warmup_steps", self.warmup_steps, "at least 0")


@dataclass(frozen=True)
class DataConfig:
    """Where text comes from, and how it becomes batches."""

    corpus: str = "office"
    """Embedded: `office`, `office_long`. TensorFlow Datasets: `tfds:NAME/CONFIG`, say `tfds:wmt14_translate/de-en`.
    Unused where train_source is given."""
    source_language: str = "en"
    """Language code of the source side."""
    target_language: str = "de"
    """Language code of the target side; chooses sacreBLEU's tokenisation."""
    train_source: str | None = None
    """Your own training text, one sentence a line (.gz too); or a .tsv of source<TAB>target, without train_target.
    Several files: their names with commas between, or a pattern in quotes, 'corpora/*.en', which is taken in the order
    of the names."""
    train_target: str | None = None
    """Target side of train_source, line by line and file by file."""
    dev_source: str | None = None
    """Validation text, as train_source. With own training text and none given, lines are held out of it."""
    dev_target: str | None = None
    """Target side of dev_source."""
    test_source: str | None = None
    """Test text, as train_source."""
    test_target: str | None = None
    """Target side of test_source."""
    data_dir: str | None = None
    """Folder of TensorFlow Datasets. None: that library's own default."""
    cache_dir: str | None = None
    """Folder of tokenized text. None: the folder `data` of the run."""
    tokenizer: str | None = None
    """An existing SentencePiece model. None: one is trained on the training text."""
    vocab_size: int = 37000
    """Word pieces to learn, both languages shared (section 5.1); an upper bound, small corpora give fewer."""
    tokenizer_type: Literal["bpe", "unigram"] = "bpe"
    """SentencePiece algorithm."""
    vocabulary_sentences: int = 2_000_000
    """Word pieces are learned from at most so many sentences, of both sides of every k-th pair: more take longer and
    more memory, and change little."""
    max_length: int = 256
    """Pairs with more word pieces than this on a side (EOS counted) are left out of training, and counted."""
    max_length_ratio: float | None = None
    """Pairs with more than this many times as many word pieces on one side as on the other (EOS not counted) are left
    out of training, and counted: Moses' clean-corpus-n, which takes 9, and 1.5 in fairseq's recipe. None: no limit."""
    batch_tokens: int = 25000
    """Padded word pieces on each side of a batch (section 5.1)."""
    packing: bool = True
    """Several pairs in a row, kept apart by masks: one static shape, little padding.
    False: one pair a row, batches of one of a few widths."""
    row_length: int | None = None
    """Word pieces in a packed row, at least max_length. None: max_length."""

    def __post_init__(self) -> None:
        check_types(self, "data.")
        for name in vars(self):
            require(getattr(self, name) != "", f"data.{name}", "", "given a value, or left out")
        require_positive("data", self, "vocab_size", "vocabulary_sentences", "batch_tokens", "row_length")
        require(
            self.vocabulary_sentences >= 1000, "data.vocabulary_sentences", self.vocabulary_sentences, "at least 1000"
        )
        require(
            self.max_length_ratio is None or 1 <= self.max_length_ratio <= 1e6,
            "data.max_length_ratio",
            self.max_length_ratio,
            "from 1 to 1e6",
        )
        require(self.max_length >= 2, "data.max_length", self.max_length, "at least 2")
        require(
            self.row_length is None or self.row_length >= self.max_length,
            "data.row_length",
            self.row_length,
            f"at least data.max_length ({self.max_length}), or the longest pair fits no row",
        )
        width = self.row_length if self.packing and self.row_length else self.max_length
        require(
            self.batch_tokens >= width,
            "data.batch_tokens",
            self.batch_tokens,
            f"at least the width of a row ({width}), or a batch has no row",
        )


@dataclass(frozen=True)
class SearchConfig:
    """Beam search (section 6.1)."""

    beam_size: int = 4
    """Hypotheses kept (M); 1 is greedy."""
    length_penalty: float = 0.6
    """alpha in log P(Y|X) / ((5 + |Y|) / 6)^alpha, |Y| counting EOS."""
    max_extra_length: int = 50
    """An output has at most as many pieces as its source plus this."""
    n_best: int = 1
    """Hypotheses returned for each sentence, at most beam_size."""
    max_source_length: int = 512
    """Longer sources (in pieces, EOS counted) are cut here, with a warning that names the line."""
    batch_tokens: int = 4096
    """Padded source pieces in one batch of translation."""

    def __post_init__(self) -> None:
        check_types(self, "search.")
        require_positive("search", self, "beam_size", "n_best", "batch_tokens")
        require(self.max_source_length >= 2, "search.max_source_length", self.max_source_length, "at least 2")
        require(0 <= self.length_penalty <= 10, "search.length_penalty", self.length_penalty, "from 0 to 10")
        require(self.beam_size <= 1024, "search.beam_size", self.beam_size, "at most 1024")
        require(self.max_extra_length >= 1, "search.max_extra_length", self.max_extra_length, "at least 1")
        require(
            self.n_best <= self.beam_size,
            "search.n_best",
            self.n_best,
            f"at most search.beam_size ({self.beam_size}): raise beam_size",
        )


@dataclass(frozen=True)
class MeshConfig:
    """Devices by axis; -1 takes all that are left."""

    data: int = -1
    """Devices that share out a batch's rows, each with all parameters."""
    fsdp: int = 1
    """Devices that share out a batch's rows and the parameters: each holds a part and gathers the rest when used."""
    tensor: int = 1
    """Devices that share out heads, feed-forward width and word pieces within a layer."""
    shard_weight_update: bool = False
    """Share out the weight update over `data` too (ZeRO stage 1): each device holds and updates a part of every matrix,
    its moments and its moving average, and gathers the rest at each step, in model.dtype. The update is the same."""

    def __post_init__(self) -> None:
        check_types(self, "mesh.")
        for name in ("data", "fsdp", "tensor"):
            value = getattr(self, name)
            require(value == -1 or 1 <= value <= 2**20, f"mesh.{name}", value, "-1 or at least 1")
        sizes = (self.data, self.fsdp, self.tensor)
        require(sizes.count(-1) <= 1, "mesh", sizes, "-1 (all that are left) on one axis at most")


@dataclass(frozen=True)
class TrainConfig:
    """The training loop."""

    steps: int = 100_000
    """Updates to make in all."""
    seed: int = 0
    """Seeds parameters, dropout and data order; the same seed repeats the run exactly."""
    accumulate: int = 1
    """Equal parts in which the rows of a batch are worked through, one after the other: less memory, same update."""
    label_smoothing: float = 0.1
    """eps_ls (section 5.4), shared over all W pieces."""
    evaluate_every: int = 2000
    """Updates between validations: loss, perplexity, and BLEU and chrF of beam search on the dev set."""
    evaluate_sentences: int = 500
    """At most this many dev sentences are translated at a validation (the loss is over all); the test set is whole."""
    checkpoint_every: int = 1000
    """Updates between checkpoints."""
    keep_checkpoints: int = 5
    """Newest checkpoints kept; the one best by BLEU is kept beside them."""
    keep_every: int | None = None
    """Updates between checkpoints that stay for good, say for averaging later; a multiple of checkpoint_every."""
    average_checkpoints: int = 5
    """Checkpoints averaged into the model that the run is scored by at its end; 1 takes the last as it is.
    Unused with optimizer.ema_decay."""
    log_every: int = 10
    """Updates between lines of metrics.jsonl and TensorBoard."""
    skip_limit: int = 10
    """Updates whose loss or gradient is not finite are skipped and counted; so many in a row end the run."""

    def evaluates_at(self, step: int) -> bool:
        """Whether a validation follows this update; the last has one always."""
        return step % self.evaluate_every == 0 or step == self.steps

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint follows this update."""
        return step % self.checkpoint_every == 0 or self.evaluates_at(step)

    def __post_init__(self) -> None:
        check_types(self, "train.")
        require_positive(
            "train", self, "steps", "evaluate_every", "evaluate_sentences", "checkpoint_every", "keep_checkpoints",
            "average_checkpoints", "log_every", "accumulate", "keep_every", "skip_limit",
        )  # fmt: skip
        require(0 <= self.seed < 2**31, "train.seed", self.seed, "at least 0 and below 2^31")
        require_fraction("train", self, "label_smoothing")
        require(
            self.average_checkpoints <= self.keep_checkpoints,
            "train.average_checkpoints",
            self.average_checkpoints,
            f"at most train.keep_checkpoints ({self.keep_checkpoints})",
        )
        require(
            self.keep_every is None or self.keep_every % self.checkpoint_every == 0,
            "train.keep_every",
            self.keep_every,
            f"a multiple of train.checkpoint_every ({self.checkpoint_every})",
        )


@dataclass(frozen=True)
class Config:
    """All of a run: config.json in its folder is this, as JSON."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The network."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Adam and its schedule."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text, word pieces and batches."""
    search: SearchConfig = field(default_factory=SearchConfig)
    """Beam search."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Devices."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """The training loop."""

    def __post_init__(self) -> None:
        check_types(self, "")
        require(
            self.model.positions == "sinusoidal" or self.data.max_length <= self.model.max_positions,
            "data.max_length",
            self.data.max_length,
            f"at most model.max_positions ({self.model.max_positions}), the rows of the learned positions",
        )

    def to_json(self) -> str:
        """Indented JSON, one key a field."""
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str, source_name: str) -> "Config":
        """The configuration that `to_json` wrote; absent fields take their defaults, unknown ones are refused.

        Raises:
            UserError: `source_name` and the line or field at fault, with the nearest name or the type wanted.
        """
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{source_name}, line {error.lineno}: not JSON ({error.msg})") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{source_name}: not a configuration ({str(error).splitlines()[0]})") from error
        if not isinstance(values, dict):
            raise UserError(f"{source_name} must hold one JSON object, but holds {type(values).__name__}")
        try:
            return build(cls, values)
        except UserError as error:
            raise UserError(f"{source_name}: {error}") from error
