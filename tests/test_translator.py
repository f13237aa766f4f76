"""The translator: every line in gives its own line out, whatever stands beside it, from the run's folder alone."""

import dataclasses
import json
import operator
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from small_models import random_params

import transformer_jax as tj
from transformer_jax.checkpointing.checkpoints import Checkpoints
from transformer_jax.cli.main import main
from transformer_jax.config import Config, DataConfig, ModelConfig, SearchConfig
from transformer_jax.data.sources import load_splits
from transformer_jax.errors import UserError
from transformer_jax.ops.masks import BOS, EOS, PAD
from transformer_jax.search.beam import SearchResult
from transformer_jax.translation import translator as translator_module
from transformer_jax.translation.batching import MOST_ROWS, amount_of, plan
from transformer_jax.translation.translator import Translator, _listed

MODEL = ModelConfig(encoder_layers=1, decoder_layers=1, d_model=16, d_ff=16, num_heads=2, dropout=0.0)
SEARCH = SearchConfig(beam_size=4, max_extra_length=2, batch_tokens=512, max_source_length=64)
CONFIG = Config(model=MODEL, search=SEARCH)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    sentences = [side for pair, _ in zip(load_splits(DataConfig()).dev, range(200), strict=False) for side in pair]
    return tj.Tokenizer.train(sentences, tmp_path_factory.mktemp("t") / "tokenizer.model", vocab_size=500)


@pytest.fixture(scope="module")
def params(tokenizer):
    return random_params(dataclasses.replace(MODEL, vocab_size=tokenizer.size), seed=1)


@pytest.fixture(scope="module")
def translator(tokenizer, params):
    return Translator(CONFIG, params, tokenizer)


@pytest.fixture
def copier(tokenizer, monkeypatch):
    """A translator whose model gives the source back, and, after the first, the source once more with a piece less."""

    def make_copy(model, search):
        def copy(params, source):
            hypotheses = np.repeat(source[:, None], search.n_best, axis=1)
            lengths = (hypotheses != PAD).sum(axis=2) - np.arange(search.n_best)
            lengths = np.maximum(lengths, 0)
            zeros = np.zeros(hypotheses.shape, np.float32)
            scores = np.broadcast_to(-np.arange(search.n_best, dtype=np.float32), lengths.shape)
            finished = np.broadcast_to(np.arange(search.n_best) == 0, lengths.shape)
            return SearchResult(*map(jax.numpy.asarray, (hypotheses, scores, lengths, scores, zeros, finished)))

        return copy

    monkeypatch.setattr(translator_module, "make_translate", make_copy)
    warnings = []
    search = dataclasses.replace(SEARCH, max_source_length=512)
    copier = Translator(dataclasses.replace(CONFIG, search=search), {}, tokenizer, warn=warnings.append)
    copier.warnings = warnings
    return copier


def marked_lines(count, seed=0):
    """Lines of 1 to 30 words in no order; each has its number in it."""
    lengths = np.random.default_rng(seed).integers(0, 30, count)
    return [" ".join([f"line {i}", *["text"] * n]) for i, n in enumerate(lengths)]


# What the model is not asked for: a copy shows it.


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 17, 65, 300])
def test_line_i_out_belongs_to_line_i_in(copier, count, monkeypatch):
    """T11: whatever the number of lines, from a list or a generator; 300 lines are two buffers of 256."""
    monkeypatch.setattr(translator_module, "BUFFER_SIZE", 256)
    lines = marked_lines(count)
    assert copier(lines) == lines
    assert copier(line for line in lines) == lines
    many = copier.translate(lines, n_best=3, batch_tokens=256)
    assert [translations[0].text for translations in many] == lines
    assert all(len(translations) == 3 for translations in many)


def test_buffers_come_one_after_the_other_and_memory_does_not_grow(copier):
    """T11: no line is read before those of the buffer before are out; a cut line keeps its number."""
    read, done = [], []
    lines = marked_lines(250)
    lines[204] = "text " * 600

    def reading():
        for line in lines:
            read.append(line)
            yield line

    stream = copier.translate_stream(reading(), buffer_size=100, on_progress=done.append)
    for i, translations in enumerate(stream):
        assert len(read) <= (i // 100 + 1) * 100
        assert i == 204 or translations[0].text == lines[i]
    assert len(read) == 250 and done[-1] == 250 and done == sorted(done)
    assert len(copier.warnings) == 1 and "line 205 has" in copier.warnings[0]


def test_each_line_is_answered_before_the_next_is_read(copier):
    asked = []

    def asking():
        for line in ("one", "", "two two", "three"):
            asked.append(line)
            yield line

    for translations in copier.translate_stream(asking(), buffer_size=1):
        assert translations[0].text == asked[-1]
    assert len(asked) == 4
    with pytest.raises(UserError, match="buffer_size is 0, but must be at least 1"):
        copier.translate_stream([], buffer_size=0)


def test_blank_lines_stay_blank_without_the_model(copier):
    """T1: empty, spaces, a zero-width space, a lone NUL."""
    lines = ["one", "", "two", "   ", "\u200b\t", "\0", "three", ""]
    assert copier(lines) == ["one", "", "two", "", "", "", "three", ""]
    assert copier("") == "" and copier([]) == [] and len(copier.translate("one")) == 1
    [[blank], _] = copier.translate(["", "a b c"], n_best=2)
    assert (blank.text, blank.score, blank.tokens, blank.token_scores, blank.finished) == ("", 0.0, (), (), True)


def test_nothing_in_a_line_makes_a_second_line_or_is_copied_by_mistake(copier):
    """T3, T5, T6: separators that are no newline, BOM, CR, tab, NUL, and a newline inside a string."""
    for char in "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\r\t\n\0":
        assert copier([f"one{char}two", "three"]) == ["one two", "three"], repr(char)
    assert copier("\ufeffone two\r") == "one two"


def test_control_pieces_in_text_are_text_and_those_of_the_model_are_not_shown(copier, monkeypatch):
    """T9: in both directions."""
    text = "stop </s> here <pad> <unk> <s> end"
    assert copier(text) == text
    word = copier.tokenizer.encode(["one"])[0][:-1]

    def make_control(model, search):
        tokens = np.array([[[*word, BOS, PAD, *word, EOS]]])
        length = np.full((1, 1), tokens.size)
        zeros = np.zeros(tokens.shape)
        return lambda params, source: SearchResult(tokens, zeros[0], length, zeros[0], zeros, length > 0)

    monkeypatch.setattr(translator_module, "make_translate", make_control)
    [[found]] = copier.translate(["x"])
    assert found.text == "one one" and "</s>" not in found.tokens


def test_an_over_long_line_is_cut_with_a_warning_and_still_gives_a_line(copier):
    """T10, E6: line 5 of 11 with 3000 words, default limit."""
    lines = [f"line {i}" for i in range(11)]
    lines[4] = "text " * 3000
    found = copier.translate(lines)
    assert [translations[0].text for translations in found[:4] + found[5:]] == lines[:4] + lines[5:]
    assert len(found[4][0].token_scores) == 512 and found[4][0].text.startswith("text text ")
    assert len(copier.warnings) == 1 and "line 5 has" in copier.warnings[0] and "512" in copier.warnings[0]


def test_an_impossible_n_best_is_refused_before_any_line_is_read(translator):
    """B5: both numbers."""
    with pytest.raises(UserError, match=r"n_best is 8.*beam_size \(4\)"):
        translator.translate_stream(iter(lambda: pytest.fail("read"), None), n_best=8)


def test_a_line_that_is_no_string_is_refused_by_number(translator):
    with pytest.raises(UserError, match="line 2 is of the type NoneType, but must be a string"):
        translator(iter(["a", None]))  # of an iterator the tests' checks of types see nothing
    with pytest.raises(UserError, match="line 1 is of the type bytes"):
        translator.score(iter([b"a"]), ["a"])


@pytest.mark.parametrize("lines", [b"a", None, 5])
def test_what_is_no_text_is_refused_by_its_type(lines):
    with pytest.raises(UserError, match=f"lines are of the type {type(lines).__name__}, but must be a string"):
        list(_listed(lines))


def test_plans_have_one_number_of_rows_a_width_and_no_batch_over_its_budget():
    """J1: whatever the lengths; every sentence once."""
    rng = np.random.default_rng(0)
    for count in (1, 2, 9, MOST_ROWS, MOST_ROWS + 1, 1000):
        lengths = rng.integers(2, 513, count).tolist()
        batches = list(plan(lengths, batch_tokens=4096, amount=amount_of(count), longest=512))
        assert sorted(np.concatenate([batch.members for batch in batches])) == list(range(count))
        shapes = {(batch.rows, batch.width) for batch in batches}
        assert len(shapes) == len({width for _, width in shapes}) <= 6
        for batch in batches:
            assert len(batch.members) <= batch.rows and batch.rows * batch.width <= 4096
            assert max(lengths[i] for i in batch.members) <= batch.width


@pytest.mark.parametrize(("count", "widths"), [(40, {64, 32, 16}), (100, {64}), (256, {64}), (257, {64, 32, 16})])
def test_a_dev_set_is_one_shape(count, widths):
    """Up to eight batches have one width, which is one program to compile; a few lines may come in other calls, too."""
    lengths = np.linspace(2, 60, count).astype(int).tolist()
    batches = list(plan(lengths, batch_tokens=2048, amount=amount_of(count)))
    assert {batch.width for batch in batches} == widths


# The real model, tiny and random.


def word_lines(tokenizer, lengths):
    """Lines of that many word pieces, EOS counted."""
    words = [piece.removeprefix("▁") for piece in tokenizer.pieces(range(tokenizer.size)) if piece[1:].isalpha()]
    words = [word for word in words if len(tokenizer.encode([f"{word} {word}"])[0]) == 3]
    assert len(words) > 20
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(words, length - 1)) for length in lengths]


class Compilations:
    """Counts the programs that XLA compiles."""

    def __init__(self):
        self.count = 0

    def __enter__(self):
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event, seconds, **_):
        self.count += event == "/jax/core/compile/backend_compile_duration"


def test_a_translation_does_not_depend_on_its_neighbours_and_shapes_are_few(tokenizer, params, translator):
    """M3, J1, J7: batches of 1 to 9 and 40, in both orders; one program a width, none twice."""
    lines = word_lines(tokenizer, range(2, 42))
    settings = {"beam_size": 4, "length_penalty": 0.6, "n_best": 2}
    with Compilations() as first:
        together = translator.translate(lines, **settings)
    assert 1 <= first.count <= 3  # 16, 32 and 64 wide
    alone = {i: translator.translate(lines[i : i + 1], **settings)[0] for i in (0, 1)}
    negated = jax.tree.map(lambda leaf: -np.asarray(leaf), params)
    with Compilations() as second:
        assert translator.translate(lines, **settings) == together
        backwards = translator.translate(lines[::-1], **settings)[::-1]
        for size in range(1, 10):
            part = translator.translate(lines[size : 2 * size], **settings)
            assert [best.text for best, _ in part] == [best.text for best, _ in together[size : 2 * size]]
        other = translator.with_params(negated).translate(lines[:9], **settings)
    assert second.count == 0
    assert [best.text for best, _ in other] != [best.text for best, _ in together[:9]]
    for i, translations in [*alone.items(), *enumerate(backwards)]:
        assert [one.tokens for one in translations] == [one.tokens for one in together[i]]
        np.testing.assert_allclose([t.score for t in translations], [t.score for t in together[i]], atol=1e-4)
    assert len({best.text for best, _ in together}) > 30


def test_scores_are_sums_of_token_scores_and_forced_decoding_agrees(tokenizer, translator):
    """B4: by the documented formula; `score` gives the same for the same pieces."""
    lines = word_lines(tokenizer, [3, 5, 9, 12])
    found = translator.translate(lines, n_best=2)
    for best in (translation for translations in found for translation in translations):
        n = len(best.token_scores)
        assert n == len(best.tokens) + best.finished
        assert sum(best.token_scores) / ((5 + n) / 6) ** 0.6 == pytest.approx(best.score, abs=1e-4)
    targets = word_lines(tokenizer, [4, 2, 11, 6])
    scores = translator.score(lines, targets)
    for score, target in zip(scores, targets, strict=True):
        assert [piece for piece, _ in score.tokens] == tokenizer.pieces(tokenizer.encode([target])[0])
        assert sum(value for _, value in score.tokens) == pytest.approx(score.log_prob)
    backwards = translator.score(lines[::-1], targets[::-1])[::-1]
    np.testing.assert_allclose([s.log_prob for s in backwards], [s.log_prob for s in scores], atol=1e-4)


def test_sources_and_targets_of_unequal_number_are_refused(translator):
    """T13: both counts."""
    with pytest.raises(UserError, match=r"3 sources but 2 targets"):
        translator.score(["a", "b", "c"], ["a", "b"])


def test_learned_positions_are_never_passed(tokenizer):
    """P2: a search that could pass them is refused, a target that does with its line."""
    model = dataclasses.replace(MODEL, positions="learned", max_positions=16)
    data = DataConfig(max_length=16)
    small = Translator(Config(model=model, search=SEARCH, data=data), {}, tokenizer)
    with pytest.raises(UserError, match=r"max_source_length \(64\).*max_positions \(16\)"):
        small("a b c")
    search = dataclasses.replace(SEARCH, max_source_length=12)
    small = Translator(Config(model=model, search=search, data=data), {}, tokenizer)
    lines = word_lines(tokenizer, [5, 40])
    with pytest.raises(UserError, match=r"target line 2 has 40 pieces.*16"):
        small.score(["a", "b"], lines)


def test_a_tokenizer_that_does_not_fit_is_refused(tokenizer, params):
    """C7: fewer rows than pieces."""
    with pytest.raises(UserError, match=rf"vocab_size is 100, but the tokenizer has {tokenizer.size} pieces"):
        Translator(Config(model=dataclasses.replace(MODEL, vocab_size=100)), params, tokenizer)


# A run's folder.


@pytest.fixture(scope="module")
def trained(tokenizer, params, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_run(folder, tokenizer, {0: None, 5: 2.5, 9: 1.0}, params)
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """A copy in another place."""
    return shutil.copytree(trained, tmp_path / "moved")


def write_run(folder, tokenizer, scores, params, **extra):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(CONFIG.to_json())
    tokenizer.save(folder / "tokenizer.model")
    checkpoints = Checkpoints(folder / "checkpoints", keep=9, warn=pytest.fail)
    for step, score in scores.items():
        scaled = jax.tree.map(lambda leaf, step=step: leaf * (step + 1), params)
        checkpoints.save(step, {"params": scaled}, {"tokenizer": tokenizer.digest, **extra}, score=score)
    checkpoints.close()


def test_the_best_checkpoint_is_taken_and_others_by_name(run, params):
    """C9 too: step 0 is a step."""
    best = Translator.load(run)
    assert best.step == 5 and best.note == "checkpoint 5, dev BLEU 2.50"
    np.testing.assert_array_equal(best._params["embedding"], params["embedding"] * 6)
    assert Translator.load(str(run), step="best").step == 5
    assert Translator.load(run, step=0).step == 0
    with pytest.raises(UserError, match="step 7"):
        Translator.load(run, step=7)


def test_the_average_is_taken_if_it_was_made_at_the_newest_step(run, tokenizer, params):
    write_run(run / "averaged", tokenizer, {9: None}, params, averaged_steps=[5, 9])
    averaged = Translator.load(run)
    assert averaged.step == 9 and averaged.note == "mean of checkpoints 5, 9"
    assert Translator.load(run / "averaged").note == averaged.note
    assert Translator.load(run, step=9).note == "checkpoint 9, dev BLEU 1.00"
    shutil.copytree(run / "checkpoints" / "9", run / "checkpoints" / "10")  # the run has gone on
    assert Translator.load(run).step == 5


def test_translation_of_a_moved_run_by_the_command_line(run, tmp_path, capfdbinary):
    """T1: five lines, 2 and 5 empty, 3 spaces only, no final newline; then a file of 0 bytes."""
    (tmp_path / "in.txt").write_bytes(b"\xef\xbb\xbfthe text\r\n\n   \nthe text\n\n")
    assert main(["translate", str(run), "--input", str(tmp_path / "in.txt"), "--beam-size", "1"]) == 0
    lines = capfdbinary.readouterr().out.split(b"\n")
    assert len(lines) == 6 and [bool(line) for line in lines] == [True, False, False, True, False, False]
    assert lines[0] == lines[3]
    (tmp_path / "in.txt").write_bytes(b"")
    assert main(["translate", str(run), "--input", str(tmp_path / "in.txt")]) == 0
    assert capfdbinary.readouterr().out == b""


def test_another_tokenizer_of_the_same_size_is_refused(run, tokenizer):
    """C7: by the digest in the checkpoint."""
    other = tj.Tokenizer(tokenizer._model.replace("▁the".encode(), "▁teh".encode()))
    assert other.size == tokenizer.size and other.digest != tokenizer.digest
    other.save(run / "tokenizer.model")
    with pytest.raises(UserError, match=r"tokenizer\.model is not the tokenizer that .* was trained with"):
        Translator.load(run)


def test_another_configuration_is_refused_with_a_parameter_and_both_shapes(run):
    """C7: more layers; more rows."""
    for name, value, words in [
        ("encoder_layers", 3, r"params/encoder/\S+ is float32\[1, .*\[3, "),
        ("vocab_size", 9999, r"params/embedding is float32\[\d+, 16\].*float32\[9999, 16\]"),
    ]:
        config = json.loads(CONFIG.to_json())
        config["model"][name] = value
        (run / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=words):
            Translator.load(run)


def test_what_is_no_run_is_refused_in_a_sentence(run, tmp_path):
    with pytest.raises(UserError, match=r"there is no folder '.*nowhere'"):
        Translator.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no run's folder: it has no config\.json"):
        Translator.load(tmp_path)
    with pytest.raises(UserError, match="is a file"):
        Translator.load(run / "config.json")
    (run / "config.json").write_text('{"model": {\n"encoder_layers": }')
    with pytest.raises(UserError, match=r"config\.json, line 2"):
        Translator.load(run)
    (run / "config.json").write_text(CONFIG.to_json())
    (run / "tokenizer.model").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.model: tokenizer cannot be read"):
        Translator.load(run)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(UserError, match="no checkpoint yet"):
        Translator.load(run)


# The package's public names.


def test_every_public_name_is_there():
    for name in tj.__all__:
        assert getattr(tj, name).__name__ == name
    assert set(tj.__all__) == set(dir(tj))
    with pytest.raises(AttributeError, match="no attribute 'Trnslator'"):
        operator.attrgetter("Trnslator")(tj)


def test_a_configuration_is_loaded_without_jax():
    code = "import sys, transformer_jax as tj; tj.load_config(sys.argv[1]); sys.exit('jax' in sys.modules)"
    root = Path(__file__).parent.parent
    subprocess.run([sys.executable, "-c", code, str(root / "configs" / "demo.py")], check=True, cwd=root)
