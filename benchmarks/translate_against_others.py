"""Translation speed beside Hugging Face `generate` and CTranslate2: the same weights, in turn in one process.

    python benchmarks/translate_against_others.py [--rounds 5] [--pieces 32]

Every contender writes exactly --pieces word pieces for each sentence (EOS is kept from ending any), on two threads.
Ratios are of the median times of the rounds; each round times every contender once.
"""

import argparse
import os
import tempfile
from collections.abc import Callable

import ctranslate2
import ctranslate2.converters.transformers
import jax
import numpy as np
import torch
import transformers
from marian_twin import NORM_EPSILON, marian_twin
from timing import medians, seconds_in_turn

from transformer_jax.config import ModelConfig, SearchConfig
from transformer_jax.ops.masks import EOS, PAD
from transformer_jax.training.state import init_params
from transformer_jax.translation.translate import make_translate

THREADS = 2
MODEL = ModelConfig(
    vocab_size=8000, encoder_layers=3, decoder_layers=3, d_model=256, d_ff=1024, num_heads=4,
    norm_epsilon=NORM_EPSILON,
)  # fmt: skip
Contender = Callable[[], np.ndarray]


def ours(params: object, source: np.ndarray, beam: int, pieces: int) -> Contender:
    """The jitted translate function, EOS made improbable through its embedding."""
    search = SearchConfig(beam_size=beam, length_penalty=0.0, max_extra_length=pieces - source.shape[1])
    translate = make_translate(MODEL, search)
    device_params = jax.device_put(params)

    def run() -> np.ndarray:
        return np.asarray(translate(device_params, source).tokens[:, 0])

    return run


def hugging_face(model: transformers.MarianMTModel, source: np.ndarray, beam: int, pieces: int) -> Contender:
    """`generate`, with its cache."""
    ids = torch.tensor(source).long()

    def run() -> np.ndarray:
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids, attention_mask=ids != PAD, num_beams=beam, do_sample=False, length_penalty=0.0,
                min_new_tokens=pieces, max_new_tokens=pieces,
            )  # fmt: skip
        return out[:, 1:].numpy()

    return run


def ctranslate(folder: str, compute: str, source: np.ndarray, beam: int, pieces: int) -> Contender:
    """CTranslate2's Translator on converted weights."""
    translator = ctranslate2.Translator(folder, compute_type=compute, inter_threads=1, intra_threads=THREADS)
    words = [[f"w{i}" for i in row if i != PAD] for row in source]

    def run() -> np.ndarray:
        results = translator.translate_batch(
            words, beam_size=beam, length_penalty=0.0, min_decoding_length=pieces, max_decoding_length=pieces
        )
        return np.array([len(result.hypotheses[0]) for result in results])

    return run


def converted(model: transformers.MarianMTModel, folder: str) -> str:
    """The twin in CTranslate2's format, for its speed: Marian's loader drops the last piece and starts from zeros, so
    that its translations are not ours."""
    loader = ctranslate2.converters.transformers._MODEL_LOADERS["MarianConfig"]
    spec = loader.get_model_spec(model)
    names = ["<pad>", "</s>", "<s>", *(f"w{i}" for i in range(3, MODEL.embedding_rows - 1))]
    spec.register_source_vocabulary(names)
    spec.register_target_vocabulary(names)
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = "<s>", "</s>", "w3"
    spec.config.decoder_start_token = "</s>"
    spec.validate()
    spec.optimize(quantization=None)
    path = os.path.join(folder, "converted")
    os.makedirs(path)
    spec.save(path)
    return path


def main() -> None:
    """Prints a table for batch 16 and 1, greedy and beam 4."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pieces", type=int, default=32)
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    transformers.logging.set_verbosity_error()
    params = jax.tree.map(np.array, init_params(MODEL, 0))
    # No hypothesis may end early: the final norm's output has a mean square of 1, so this row loses every time.
    bias = params["decoder"]["residual_3"]["norm"]["bias"]
    bias[-1] += 0.3
    params["embedding"][EOS] = -10.0 * np.sign(bias[-1])
    generator = np.random.default_rng(0)
    print(f"d={MODEL.d_model}, {MODEL.encoder_layers}+{MODEL.decoder_layers} layers, {MODEL.vocab_size} pieces, "
          f"{arguments.pieces} pieces a sentence, {THREADS} threads; jax {jax.__version__}, torch {torch.__version__}, "
          f"transformers {transformers.__version__}, ctranslate2 {ctranslate2.__version__}")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        # CTranslate2's converter changes the weights of the model it is given: it gets one of its own.
        path = converted(marian_twin(MODEL, params, 512), folder)
        twin = marian_twin(MODEL, params, 512)
        for batch in (16, 1):
            source = generator.integers(4, MODEL.embedding_rows - 1, (batch, 24)).astype(np.int32)
            for beam in (1, 4):
                measure(
                    f"batch {batch:2} {'greedy' if beam == 1 else f'beam {beam}'}",
                    {
                        "ours": ours(params, source, beam, arguments.pieces),
                        "Hugging Face": hugging_face(twin, source, beam, arguments.pieces),
                        "CTranslate2 f32": ctranslate(path, "float32", source, beam, arguments.pieces),
                        "CTranslate2 int8": ctranslate(path, "int8", source, beam, arguments.pieces),
                    },
                    batch * arguments.pieces,
                    arguments.rounds,
                )


def measure(title: str, contenders: dict[str, Contender], pieces: int, rounds: int) -> None:
    """Times the contenders in turn."""
    outputs = {name: run() for name, run in contenders.items()}
    if any((outputs[name] != outputs["ours"].shape[1]).any() for name in contenders if name.startswith("CTranslate2")):
        raise SystemExit("CTranslate2 did not write as many pieces as it was asked for")
    same = np.mean([np.array_equal(*rows) for rows in zip(outputs["ours"], outputs["Hugging Face"], strict=True)])
    found = medians(seconds_in_turn(contenders, rounds))
    for name, median in found.items():
        print(
            f"{title}  {name:17} {pieces / median:8,.0f} pieces/s   ours is {median / found['ours']:.2f} times as fast",
            flush=True,
        )
    print(f"{title}  rows that ours and Hugging Face translate alike: {same:.0%}")


if __name__ == "__main__":
    main()
