"""What is shown to readers runs: the examples, with tiny sizes, and the code blocks of README and docs."""

import dataclasses
import importlib
import pathlib
import re
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_lowering import lower, on

ROOT = pathlib.Path(__file__).parents[1]


def test_minimal_flash(capsys):
    """It prints a line of errors for each mask, and checks them itself."""
    runpy.run_path(str(ROOT / "examples" / "minimal_flash.py"), run_name="__main__")
    assert "causal" in capsys.readouterr().out


@pytest.fixture
def example(monkeypatch):
    """Imports one by its name, as they import each other."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module


def test_packed_documents(example):
    """Every token but the last of a document has the next one as its target; positions count from 0 in each."""
    data = example("data")
    documents = [np.array([data.BEGIN, *range(n)], np.int32) for n in (3, 5, 9)]
    rows = data.packed(documents, 4, 40, np.random.default_rng(0))
    for ids, targets, segments, positions in zip(*rows.values(), strict=True):
        starts = np.flatnonzero(ids == data.BEGIN)
        np.testing.assert_array_equal(np.flatnonzero(np.diff(segments)), starts[starts > 0] - 1)
        np.testing.assert_array_equal(positions[starts], 0)
        ends = np.append(np.diff(segments) != 0, targets[-1] == -1)
        np.testing.assert_array_equal(targets == -1, ends)
        np.testing.assert_array_equal(targets[:-1][~ends[:-1]], ids[1:][~ends[:-1]])


def test_train_and_generate(example, tmp_path, capsys):
    """Training that stops and goes on takes the steps of training that does not; the cache changes no token."""
    train_gpt, generate = example("train_gpt"), example("generate")
    given = f"--steps=4 --length=32 --batch=2 --save-every=2 --checkpoints={tmp_path}".split()
    straight = train_gpt.main([*given[:-1], f"--checkpoints={tmp_path / 'straight'}"])
    resumed = [*train_gpt.main([*given, "--stop=2"]), *train_gpt.main(given)]
    assert straight == resumed and len(straight) == 4
    assert train_gpt.main(given) == [] and "nothing left to do" in capsys.readouterr().out

    prompts = ["The assert", "A"]
    model = train_gpt.load(tmp_path, "llama3-tiny")
    ids, lengths = generate.padded(prompts)
    model.init_cache(2, ids.shape[1] + 6)
    logits = generate.prefill(model, ids, lengths)
    drawn = np.asarray(generate.decode(model, logits, jax.random.key(0), 6, 1e-6))
    rows = np.pad(ids, ((0, 0), (0, 6)))
    for row, length, new in zip(rows, lengths, drawn, strict=True):
        row[length : length + 6] = new
    best = np.asarray(nnx.jit(lambda model, ids: model(ids))(model, rows)).argmax(-1)
    for row, length, new in zip(best, lengths, drawn, strict=True):
        np.testing.assert_array_equal(row[length - 1 : length + 5], new)
    texts = generate.main([*prompts, f"--checkpoints={tmp_path}", "--count=3"])
    assert [text.startswith(prompt) for text, prompt in zip(texts, prompts, strict=True)] == [True, True]
    with pytest.raises(SystemExit, match=r"gemma2-tiny: no checkpoint; run train_gpt\.py"):
        train_gpt.load(tmp_path, "gemma2-tiny")


@pytest.mark.parametrize("name", ["llama3-small", "gemma2-small"])
def test_program_of_the_real_size_has_the_kernels(example, name):
    """One layer of each kind, lowered for an H200: forward and backward kernels in each, and nothing is T×S."""
    models = example("models")
    design, length = models.DESIGNS[name], 4096
    design = dataclasses.replace(design, layers=len(design.windows))
    model = nnx.eval_shape(lambda: models.Decoder(design, jnp.bfloat16, remat=True, rngs=nnx.Rngs(0)))
    graph, params = nnx.split(model)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    with on("H200"):
        text = lower(jax.grad(lambda params, ids: nnx.merge(graph, params)(ids, ids, ids).mean()), params, ids)
    for kernel in ("flash_forward", "flash_backward"):
        assert text.count(f"{kernel}_mosaic_gpu") == len(design.windows)
    assert f"{length}x{length}x" not in text


def test_gemma(example, tmp_path):
    """The model with a soft cap and alternating windows trains, with blocks recomputed."""
    given = f"--model=gemma2-tiny --steps=1 --length=32 --batch=1 --remat --checkpoints={tmp_path}"
    losses = example("train_gpt").main(given.split())
    assert len(losses) == 1 and 5 < losses[0] < 7  # log 257 = 5.5


def test_train_encoder(example, capsys):
    """What is behind the lengths has no part in the result."""
    encoder, data = example("train_encoder"), example("data")
    given = "--width=16 --layers=1 --heads=2 --length=32 --batch=4 --masked-steps=2 --steps=2"
    assert 0 < encoder.main(given.split()) <= 1 and "masked bytes: loss" in capsys.readouterr().out

    model = encoder.Classifier(encoder.Encoder(width=16, layers=1, heads=2))
    ids, lengths = data.padded(data.prose(), 2, 32, np.random.default_rng(0))
    other = np.where(np.arange(32) < lengths[:, None], ids, 7)
    variables, apply = jax.jit(model.init)(jax.random.key(0), ids, lengths), jax.jit(model.apply)
    assert (lengths < 32).any()
    np.testing.assert_array_equal(apply(variables, ids, lengths), apply(variables, other, lengths))


@pytest.mark.parametrize("page", ["README.md", "docs/flax.md", "docs/scores.md"])
def test_code_blocks(page):
    """The Python blocks, one after the other in one namespace; what they assert holds."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    namespace: dict = {}
    for block in blocks:
        exec(block, namespace)
    assert len(blocks) >= 3 and namespace["out"].shape == namespace["query"].shape
