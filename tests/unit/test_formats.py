"""Tasks of benchmarks: what is recognised in them, and the submissions that are made of them."""

from __future__ import annotations

import importlib
import json
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from flashwright import gpu as gpus
from flashwright import spec as specs
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.variants import make_spec
from flashwright.cli.main import app
from flashwright.formats.task import FLASHINFER, KERNELBENCH, ROBUST_KBENCH, Task
from flashwright.lang.format import format_tree
from flashwright.lang.parse import parse
from flashwright.rewrite.sequenced import sequenced
from tests.unit.test_export_steps import made

torch = pytest.importorskip("torch")
from flashwright.formats import definition_process, module_process, recognise  # noqa: E402

HEADS, LENGTH, DIM = 2, 20, 16
PROJECTED = f"""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.inner = nn.ModuleList([nn.Linear(width, 3 * width), nn.Linear(width, width)])
        self.register_buffer("seen", torch.ones(64, 64).tril().view(1, 1, 64, 64))

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.inner[0](x).split(c, dim=2)
        q, k, v = (y.view(b, n, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        s = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        s = s.masked_fill(self.seen[:, :, :n, :n] == 0, float("-inf"))
        o = WEIGHTS @ v
        return self.inner[1](o.transpose(1, 2).reshape(b, n, c))

def get_inputs():
    return [torch.rand(3, {LENGTH}, {HEADS * DIM})]

def get_init_inputs():
    return [{HEADS * DIM}, {HEADS}]
"""
PLAIN = f"""
import torch
import torch.nn.functional as F

class Model(torch.nn.Module):
    def forward(self, q, k, v):
        n = q.shape[2]
        at = torch.arange(n)
        behind = at[:, None] - at
        BODY

def get_inputs():
    return [torch.rand(2, {HEADS}, {LENGTH}, {DIM}) for _ in range(3)]

def get_init_inputs():
    return []
"""
USUAL = {"variant": "mha", "heads": HEADS, "kv_heads": HEADS, "head_dim": DIM, "lse": False}
SPELLINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "by PyTorch": ("return F.scaled_dot_product_attention(q, k, v)", {}),
    "by PyTorch, causal, scaled": (
        "return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5)",
        {"causal": True, "scale": 0.5},
    ),
    "Q is scaled before, by hand": (
        "return ((q * 0.25) @ k.mT * 2).softmax(-1) @ v",
        {"scale": 0.5},
    ),
    "as bmm, with a mask that is added": (
        "q, k, v = (x.flatten(0, 1) for x in (q, k, v))\n"
        "        hidden = torch.where(behind < 0, float('-inf'), 0.0)\n"
        "        return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)) + hidden, 2), v)",
        {"causal": True, "scale": 1.0, "heads": 1, "kv_heads": 1},
    ),
    "a window, with a large negative number": (
        "s = torch.where(behind.abs() < 5, q @ k.mT * 0.25, -1e9)\n"
        "        return torch.softmax(s, -1) @ v",
        {"window": 5},
    ),
    "a causal window and a softcap": (
        "s = 30 * torch.tanh(q @ k.mT * 0.5 / 30)\n"
        "        s = s.masked_fill((behind < 0) | (behind >= 7), float('-inf'))\n"
        "        return F.softmax(s, dim=-1) @ v",
        {"causal": True, "window": 7, "softcap": 30.0, "scale": 0.5},
    ),
    "ReLU": (
        "s = (q @ k.mT * 0.25).masked_fill(behind < 0, float('-inf'))\n"
        "        return F.relu(s) @ v",
        {"variant": "relu", "causal": True},
    ),
}
REFUSED: dict[str, tuple[str, str]] = {
    "a bias": ("return (q @ k.mT + behind).softmax(-1) @ v", "a bias is added"),
    "a mask of no form": (
        "return (q @ k.mT).masked_fill(behind % 3 == 1, float('-inf')).softmax(-1) @ v",
        "neither causal nor a window",
    ),
    "the other corner": (
        "return F.scaled_dot_product_attention(q[:, :, :9], k, v, is_causal=True)",
        "neither causal nor a window",
    ),
    "scores of the inputs": ("return (q @ k.mT + k @ q.mT).softmax(-1) @ v", "another tensor"),
    "a function of scores": ("return (q @ k.mT).sin().softmax(-1) @ v", "another function"),
    "over the queries": ("return (q @ k.mT).softmax(-2) @ v", "not over the keys"),
    "the weights as well": (
        "w = (q @ k.mT).softmax(-1)\n        return w @ v + w.sum()",
        "besides",
    ),
    "no attention": ("return q.softmax(-1) + k + v", "no attention"),
    "dropout": ("return F.dropout((q @ k.mT).softmax(-1), 0.5) @ v", "dropout of 0.5"),
    "an error": ("return q @ v", "RuntimeError"),
}


def told(tmp_path: Path, text: str, name: str = "task.py") -> dict[str, Any]:
    file = tmp_path / name
    file.write_text(text)
    return module_process.told(str(file), KERNELBENCH)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_an_attention_is_recognised_however_it_is_spelled(tmp_path: Path, spelling: str) -> None:
    body, own = SPELLINGS[spelling]
    found = told(tmp_path, PLAIN.replace("BODY", body))
    assert found.get("settings") == {**USUAL, **own}, found
    assert found["rms"] < 1e-6
    assert found["keys"] == LENGTH


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_spec_describes_is_refused_with_the_reason(tmp_path: Path, case: str) -> None:
    body, why = REFUSED[case]
    found = told(tmp_path, PLAIN.replace("BODY", body))
    assert why in found.get("wrong", ""), found


def test_a_refusal_names_the_line(tmp_path: Path) -> None:
    text = PLAIN.replace("BODY", REFUSED["a bias"][0])
    line = 1 + text.splitlines().index("        " + REFUSED["a bias"][0])
    assert told(tmp_path, text)["at"] == f"task.py:{line}"


def test_a_mask_beyond_the_first_keys_is_seen(tmp_path: Path, monkeypatch: Any) -> None:
    """Inputs get fewer sequences to be looked at, but no shorter ones where a mask is."""
    monkeypatch.setattr(recognise, "MOST", 2 * HEADS * LENGTH * LENGTH - 1)
    monkeypatch.setattr(module_process, "FEW", (1, 1, 8, 8))
    found = told(
        tmp_path, PLAIN.replace("BODY", SPELLINGS["a window, with a large negative number"][0])
    )
    assert found.get("settings", found)["window"] == 5
    monkeypatch.setattr(recognise, "MOST", 200)
    found = told(
        tmp_path, PLAIN.replace("BODY", SPELLINGS["a window, with a large negative number"][0])
    )
    assert "too many to look at" in found["wrong"]
    found = told(tmp_path, PLAIN.replace("BODY", SPELLINGS["Q is scaled before, by hand"][0]))
    assert found["settings"]["scale"] == 0.5


# --- submissions ------------------------------------------------------------------------------


def package_of(task: Task, folder: Path) -> Path:
    """A package for a task; its kernel is translated but not compiled."""
    spec, card = make_spec(task.variant, **task.options), gpus.find("h200")
    made(folder, write_code(write_sketch(spec), spec, card).code, card.name, spec)
    (folder / "task.json").write_text(task.dump())
    return folder


def task_of(found: dict[str, Any], form: str, source: str) -> Task:
    options = dict(found["settings"])
    steps, result = tuple(found["steps"]), found["result"]
    variant = options.pop("variant")
    arguments = tuple(found["arguments"])
    return Task(form, "mine", variant, options, source, found["keys"], arguments, steps, result)


def export(folder: Path, form: str, out: Path) -> Result:
    return CliRunner().invoke(app, ["export", str(folder), "--as", form, "-o", str(out)])


def by_hand(settings: dict[str, Any]) -> Callable[..., Any]:
    """An extension whose function is PyTorch's attention."""
    extension = types.SimpleNamespace()
    extension.attention_of = lambda q, k, v: recognise.attend(q, k, v, settings)
    return lambda **given: extension


@pytest.mark.parametrize("weights", ["F.softmax(s, dim=-1)", "F.relu(s)"])
def test_model_new_computes_what_model_does(tmp_path: Path, monkeypatch: Any, weights: str) -> None:
    text = PROJECTED.replace("WEIGHTS", weights)
    found = told(tmp_path, text)
    folder = package_of(task_of(found, KERNELBENCH, text), tmp_path / "package")
    done = export(folder, "kernelbench", tmp_path / "out")
    assert done.exit_code == 0, done.output
    submission = (tmp_path / "out" / "model_new.py").read_text()
    assert "__global__" in submission
    assert "#include <fw/" not in submission
    assert not re.search(r"\b(try|except|pass)\b", re.sub(r"(//|#).*", "", submission))

    monkeypatch.setattr("torch.utils.cpp_extension.load_inline", by_hand(found["settings"]))
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path))
    (tmp_path / "cute").mkdir()
    space: dict[str, Any] = {"__name__": "submission"}
    exec(compile(submission, "model_new.py", "exec"), space)
    torch.manual_seed(0)
    model = space["Model"](*space["get_init_inputs"]())
    new = space["ModelNew"](*space["get_init_inputs"]())
    new.load_state_dict(model.state_dict())
    (x,) = space["get_inputs"]()
    torch.testing.assert_close(new(x), model(x))


ROBUST = f"""
import torch
import torch.nn as nn
import torch.nn.functional as F

def forward_fn(x, weights, biases):
    b, n, c = x.shape
    both = F.linear(x, weights, biases).view(b, n, 3, {HEADS}, {DIM})
    q, k, v = both.permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c)

class Model(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3 * width, width))
        self.biases = nn.Parameter(torch.randn(3 * width))

    def forward(self, x, fn=forward_fn):
        return fn(x, self.weights, self.biases)

def get_inputs(batch_size=2, tokens=1024, width=64):
    return [torch.randn(batch_size, tokens, width)]

input_names = ["x"]
"""
SIZES = {
    "single_input_configs": [{"batch_size": 3, "tokens": LENGTH}],
    "single_init_configs": [{}],
    "single_shared_configs": [{"width": HEADS * DIM}],
}


def robust_task(folder: Path, text: str = ROBUST) -> Path:
    folder.mkdir()
    (folder / "func_forward.py").write_text(text)
    (folder / "config_forward.json").write_text(json.dumps(SIZES))
    return folder


def test_forward_of_robust_kbench_takes_what_forward_fn_takes(tmp_path: Path) -> None:
    folder = robust_task(tmp_path / "mine")
    files = str(folder / "func_forward.py"), str(folder / "config_forward.json")
    found = module_process.told(files[0], ROBUST_KBENCH, files[1])
    assert found["settings"] == USUAL
    package = package_of(task_of(found, ROBUST_KBENCH, ROBUST), tmp_path / "package")
    done = export(package, "robust-kbench", tmp_path / "out")
    assert done.exit_code == 0, done.output
    text = (tmp_path / "out" / "forward.cu").read_text()
    body = text[text.index("at::Tensor forward(") :]
    head, *lines = [line.strip() for line in body.splitlines()]
    assert head.count("at::Tensor ") == 1 + 3
    assert lines[0].endswith(
        "= at::linear(" + head.split("(")[1].replace("at::Tensor ", "").rstrip(") {") + ");"
    )
    assert f".reshape({{3, {LENGTH}, 3, {HEADS}, {DIM}}});" in body
    assert "attention_of(" in body
    assert "PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)" in body

    hard = ROBUST.replace(
        "F.linear(x, weights, biases)", "F.linear(x.sort(-1)[0], weights, biases)"
    )
    (folder / "func_forward.py").write_text(hard)
    found = module_process.told(files[0], ROBUST_KBENCH, files[1])
    package = package_of(task_of(found, ROBUST_KBENCH, hard), tmp_path / "hard")
    done = export(package, "robust-kbench", tmp_path / "none")
    assert done.exit_code == 2
    assert "aten.sort" in done.output


def test_a_package_without_a_task_has_no_submission(tmp_path: Path) -> None:
    found = told(tmp_path, PLAIN.replace("BODY", SPELLINGS["by PyTorch"][0]))
    folder = package_of(task_of(found, KERNELBENCH, ""), tmp_path / "package")
    assert "but of kernelbench" in export(folder, "robust-kbench", tmp_path / "out").output
    (folder / "task.json").unlink()
    done = export(folder, "kernelbench", tmp_path / "out")
    assert done.exit_code == 2
    assert "--from FILE" in done.output


# --- FlashInfer-Bench -------------------------------------------------------------------------

ONE = """
def one(q, k, v, scale):
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    s = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    behind = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
    s = s.masked_fill(behind < 0, -math.inf) if CAUSAL else s
    return torch.einsum("hqk,khd->qhd", s.softmax(-1), v), s.logsumexp(-1).T / math.log(2)
"""
RAGGED = (
    """
import math
import torch

def run(q, k, v, qo_indptr, kv_indptr, sm_scale):
    output = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -math.inf)
    for b in range(len(qo_indptr) - 1):
        rows, keys = slice(*qo_indptr[b : b + 2]), slice(*kv_indptr[b : b + 2])
        if q[rows].numel():
            o, lse[rows] = one(q[rows], k[keys], v[keys], sm_scale)
            output[rows] = o.to(q.dtype)
    return output, lse
"""
    + ONE
)
PAGED = (
    """
import math
import torch

def run(q, k_cache, v_cache, kv_indptr, kv_indices, kv_last_page_len, sm_scale):
    output = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -math.inf)
    for b in range(len(q)):
        pages = kv_indices[kv_indptr[b] : kv_indptr[b + 1]].long()
        keys = (len(pages) - 1) * k_cache.shape[1] + int(kv_last_page_len[b])
        k, v = (x[pages].flatten(0, 1)[:keys] for x in (k_cache, v_cache))
        o, lse[b : b + 1] = one(q[b : b + 1], k, v, sm_scale)
        output[b] = o[0].to(q.dtype)
    return output, lse
"""
    + ONE
)
AXES = {
    name: {"type": "const", "value": size}
    for name, size in (
        ("num_qo_heads", 4),
        ("num_kv_heads", 2),
        ("head_dim", 64),
        ("page_size", 16),
    )
} | {
    name: {"type": "var"}
    for name in ("total_q", "total_kv", "len_indptr", "batch_size", "num_pages", "num_kv_indices")
}


def bf16(*shape: str) -> dict[str, Any]:
    return {"shape": shape, "dtype": "bfloat16"}


def ints(name: str) -> dict[str, Any]:
    return {"shape": [name], "dtype": "int32"}


SCALE = {"shape": None, "dtype": "float32"}
CACHE = bf16("num_pages", "page_size", "num_kv_heads", "head_dim")


def definition(kind: str, causal: bool = True) -> dict[str, Any]:
    ragged = kind == "gqa_ragged"
    tokens = "total_q" if ragged else "batch_size"
    q = bf16(tokens, "num_qo_heads", "head_dim")
    keys = bf16("total_kv", "num_kv_heads", "head_dim")
    starts = {"qo_indptr": ints("len_indptr"), "kv_indptr": ints("len_indptr")}
    paged = {
        "kv_indptr": ints("len_indptr"),
        "kv_indices": ints("num_kv_indices"),
        "kv_last_page_len": ints("batch_size"),
    }
    inputs = (
        {"q": q, "k": keys, "v": keys, **starts}
        if ragged
        else {"q": q, "k_cache": CACHE, "v_cache": CACHE, **paged}
    )
    reference = RAGGED if ragged else PAGED
    used = {axis for one in (*inputs.values(), q) for axis in one["shape"]}
    lse = {"shape": [tokens, "num_qo_heads"], "dtype": "float32"}
    return {
        "name": f"{kind}_mine",
        "op_type": kind,
        "axes": {name: AXES[name] for name in AXES if name in used},
        "inputs": {**inputs, "sm_scale": SCALE},
        "outputs": {"output": q, "lse": lse},
        "reference": reference.replace("CAUSAL", str(causal)),
    }


def asked(told: dict[str, Any], file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options that the Definition says, and what its process says of it."""
    from flashwright.formats.definition import _options

    file.write_text(json.dumps(told))
    options = _options(told)
    return options, definition_process.told(str(file), json.dumps(options))


def test_the_mask_of_a_definition_is_found_by_its_reference(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    options, found = asked(definition("gqa_ragged"), file)
    assert options == {
        "variant": "gqa",
        "packed": True,
        "dtype": "bf16",
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
    }
    assert found["causal"] is True
    assert asked(definition("gqa_ragged", causal=False), file)[1]["causal"] is False
    options, found = asked(definition("gqa_paged"), file)
    assert (options["decode"], options["page"]) == (1, 16)
    assert "wrong" not in found
    other = definition("gqa_ragged")
    other["reference"] = other["reference"].replace(" / math.log(2)", "")
    assert "lse of base 2" in asked(other, file)[1]["wrong"]


@pytest.mark.parametrize("kind", ["gqa_ragged", "gqa_paged"])
def test_a_solution_computes_what_its_definition_says(
    tmp_path: Path, monkeypatch: Any, kind: str
) -> None:
    """Its launcher is replaced by PyTorch's attention of the tensors that a kernel would get."""
    from flashwright.serving import reference

    one = definition(kind)
    options, found = asked(one, tmp_path / "mine.json")
    options |= {"causal": True} if found["causal"] else {}
    variant, arguments = options.pop("variant"), (*one["inputs"], *one["outputs"])
    spec, card = make_spec(variant, **options), gpus.find("h200")
    task = Task(FLASHINFER, one["name"], variant, options, json.dumps(one), arguments=arguments)
    folder = sequences_package(spec, card, tmp_path / "package")
    (folder / "task.json").write_text(task.dump())
    done = export(folder, "flashinfer", tmp_path / "out")
    assert done.exit_code == 0, done.output
    (file,) = (tmp_path / "out" / "solutions").rglob("*.json")
    solution = json.loads(file.read_text())
    assert solution["definition"] == one["name"]

    def launch(inputs: list[Any], outputs: list[Any], dims: dict[str, int]) -> None:
        places = ("startsq", "startsk") if kind == "gqa_ragged" else ("table", "lengthsk")
        given = dict(zip(("q", "k", "v", *places), inputs, strict=True))
        assert dims["kv_len"] == 130
        for name in "qkv":
            given[name] = given[name].transpose(-3, -2)
        o, lse = reference.attention(spec, given)
        outputs[0].copy_(o.transpose(-3, -2))
        outputs[1].copy_(lse)

    main = solution_module(tmp_path, solution, launch, monkeypatch)
    inputs = definition_process.workload(one, {**options, "variant": variant})
    output = torch.empty_like(inputs["q"])
    lse = torch.empty(inputs["q"].shape[:2])
    main.run(*inputs.values(), output, lse)
    space: dict[str, Any] = {}
    exec(one["reference"], space)
    wanted = space["run"](**inputs)
    torch.testing.assert_close(output, wanted[0], atol=0.02, rtol=0.02)
    torch.testing.assert_close(lse, wanted[1], atol=1e-3, rtol=1e-3)
    with pytest.raises(ValueError, match="sm_scale"):
        main.run(*{**inputs, "sm_scale": 1.0}.values(), output, lse)


def test_flashinfer_bench_takes_the_dataset(tmp_path: Path) -> None:
    bench = pytest.importorskip("flashinfer_bench", reason="flashinfer-bench is not installed")
    one = definition("gqa_ragged")
    options = {"packed": True, "causal": True, "heads": 4, "kv_heads": 2, "head_dim": 64}
    arguments = (*one["inputs"], *one["outputs"])
    task = Task(FLASHINFER, one["name"], "gqa", options, json.dumps(one), arguments=arguments)
    spec = make_spec("gqa", **options)
    folder = sequences_package(spec, gpus.find("h200"), tmp_path / "package")
    (folder / "task.json").write_text(task.dump())
    assert export(folder, "flashinfer", tmp_path / "out").exit_code == 0
    found = bench.TraceSet.from_path(str(tmp_path / "out"))
    assert set(found.definitions) == {one["name"]}
    (solution,) = found.solutions[one["name"]]
    assert solution.definition == one["name"]


def sequences_package(spec: specs.AttentionSpec, card: gpus.Gpu, folder: Path) -> Path:
    """A package for sequences of any lengths, without its compiled kernels."""
    code = write_code(write_sketch(spec.each), spec.each, card).code
    return made(folder, format_tree(sequenced(parse(code), spec)), card.name, spec)


def solution_module(
    folder: Path, solution: dict[str, Any], launch: Callable[..., None], monkeypatch: Any
) -> Any:
    """The Solution's main.py, imported as its package, with a launcher of ours."""
    package = folder / "solution_of_a_test"
    package.mkdir()
    for source in solution["sources"]:
        (package / source["path"]).write_text(source["content"])
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(folder))
    for name in [name for name in sys.modules if name.startswith(package.name)]:
        monkeypatch.delitem(sys.modules, name)
    launcher = importlib.import_module(f"{package.name}.launch")
    monkeypatch.setattr(launcher.Kernels, "launch", lambda self, *given: launch(*given))
    cores = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: cores)
    return importlib.import_module(f"{package.name}.main")
