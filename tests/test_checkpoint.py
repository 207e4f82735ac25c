"""Checkpoints open whole or not at all, and are written whole or not at all."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from compress.arch import read_spec
from compress.checkpoint import (
    Checkpoint,
    LazyTensor,
    check_tensors,
    open_part,
    publish,
    save_part,
    write_checkpoint,
)
from compress.errors import UserError
from compress.tensorfile import DTYPES
from tests.tiny import tiny_model

INDEX = "model.safetensors.index.json"


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    count = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype == torch.bool else 100  # small bytes: no NaN, so that equality is meaningful
    return torch.randint(0, high, (count,), generator=generator, dtype=torch.uint8).view(dtype).reshape(shape)


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A tiny model in at least four shards."""
    directory = tmp_path / "sharded"
    source = Checkpoint.open(tiny_model(tmp_path / "plain"))
    tensors = {name: source.ref(name) for name in source.names}
    write_checkpoint(directory, tensors, source.config, source.path, max_shard_bytes=120_000)
    assert len(list(directory.glob("*.safetensors"))) >= 4
    return directory


# Files


def test_part_holds_every_dtype_and_is_read_by_safetensors(tmp_path: Path):
    tensors = {name: random_tensor(dtype, 3, 5) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "strided": torch.randn(6, 4).t()}
    save_part(tmp_path / "part.safetensors", tensors, {"format": "pt"})
    reference = load_file(tmp_path / "part.safetensors")
    part = open_part(tmp_path / "part.safetensors")
    assert set(part.names) == set(reference) == set(tensors)
    for name, tensor in tensors.items():
        back = part.read(name)
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        for other in (tensor.contiguous(), reference[name]):
            assert torch.equal(back.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        assert part.ref(name).start % tensor.dtype.itemsize == 0
    assert [path.name for path in tmp_path.iterdir()] == ["part.safetensors"]


def test_bytes_depend_on_contents_alone(tmp_path: Path):
    tensors = {name: torch.arange(6.0) for name in ("b", "a", "c")}
    save_part(tmp_path / "one", tensors)
    save_part(tmp_path / "two", dict(reversed(tensors.items())))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_failed_write_leaves_the_old_file(tmp_path: Path):
    def fail() -> torch.Tensor:
        raise RuntimeError("stopped")

    save_part(tmp_path / "part", {"a": torch.ones(2)})
    with pytest.raises(RuntimeError, match="stopped"):
        save_part(tmp_path / "part", {"a": LazyTensor(torch.float32, (2,), fail)})
    assert torch.equal(open_part(tmp_path / "part").read("a"), torch.ones(2))
    assert len(list(tmp_path.iterdir())) == 1


# Reading


def test_reads_what_transformers_wrote(tmp_path: Path):
    path = tiny_model(tmp_path / "model", dtype="bfloat16", max_shard_size="100KB")
    checkpoint = Checkpoint.open(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert set(checkpoint.names) == set(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(checkpoint.read(name), tensor)
        assert (checkpoint.shape(name), checkpoint.dtype(name)) == (tuple(tensor.shape), torch.bfloat16)
        assert checkpoint.nbytes(name) == tensor.nbytes
    assert checkpoint.total_bytes == sum(tensor.nbytes for tensor in model.state_dict().values())


def test_names_count_layers_as_numbers(tmp_path: Path):
    tensors = {f"model.layers.{i}.x": torch.zeros(1) for i in (10, 2, 1)}
    write_checkpoint(tmp_path / "out", tensors, {}, sidecars_from=None)
    assert Checkpoint.open(tmp_path / "out").names == [f"model.layers.{i}.x" for i in (1, 2, 10)]


def edit_index(path: Path, change: Callable[[dict[str, str]], object]) -> None:
    content = json.loads((path / INDEX).read_text())
    change(content["weight_map"])
    (path / INDEX).write_text(json.dumps(content))


def shard(path: Path, number: int) -> Path:
    return sorted(path.glob("*.safetensors"))[number]


def truncate(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


def swap_two(weight_map: dict[str, str]) -> None:
    first, last = min(weight_map), max(weight_map)
    weight_map[first], weight_map[last] = weight_map[last], weight_map[first]


def copy_tensor(path: Path) -> None:
    """Store the first shard's tensors in the second shard too."""
    both = load_file(shard(path, 0)) | load_file(shard(path, 1))
    save_part(shard(path, 1), both)


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    ("deleted", lambda path: shard(path, 1).unlink(), r"shard 'model-00002.*missing"),
    ("truncated", lambda path: truncate(shard(path, 1), -100), r"model-00002.*truncated: its header describes"),
    ("cut in header", lambda path: truncate(shard(path, 1), 50), r"model-00002.*truncated"),
    ("empty", lambda path: truncate(shard(path, 1), 0), r"model-00002.*truncated"),
    ("longer", lambda path: shard(path, 1).open("ab").write(b"x"), r"model-00002.*1 bytes after the last tensor"),
    (
        "header",
        lambda path: shard(path, 1).write_bytes(shard(path, 1).read_bytes().replace(b'"F32"', b'"F3', 1)),
        "model-00002.*header",
    ),
    (
        "renamed in index",
        lambda path: edit_index(path, lambda m: m.update(odd=m.pop("model.norm.weight"))),
        r"index.json: tensor 'odd' is in no shard",
    ),
    ("wrong shard in index", lambda path: edit_index(path, swap_two), r"index.json: tensor .* is said to be in"),
    (
        "lost from index",
        lambda path: edit_index(path, lambda m: m.pop("model.norm.weight")),
        r"'model.norm.weight' is not in .*index.json",
    ),
    (
        "shard renamed in index",
        lambda path: edit_index(path, lambda m: m.update({"model.norm.weight": "model-00009-of-00009.safetensors"})),
        r"index.json: shard 'model-00009.*missing; did you mean",
    ),
    ("twice", copy_tensor, r"model-00002.*tensor .* is also in model-00001"),
    (
        "stray shard",
        lambda path: shutil.copy(shard(path, 0), path / "model-00001-of-00009.safetensors"),
        r"model-00001-of-00009.safetensors is not in",
    ),
    ("no index", lambda path: (path / INDEX).unlink(), rf"but no {INDEX}"),
    ("index not JSON", lambda path: (path / INDEX).write_text("{"), "index.json: not valid JSON"),
    ("no weight_map", lambda path: (path / INDEX).write_text("{}"), "index.json: no weight_map"),
    (
        "Git LFS",
        lambda path: shard(path, 1).write_text("version https://git-lfs.github.com/spec/v1\n"),
        "model-00002.*Git LFS pointer",
    ),
]


@pytest.mark.parametrize(("damage", "message"), [case[1:] for case in DAMAGE], ids=[case[0] for case in DAMAGE])
def test_damage_is_named_in_one_line(damage: Callable[[Path], object], message: str, sharded: Path):
    """Row 18: never a partly loaded model, never a cryptic header error."""
    Checkpoint.open(sharded)
    damage(sharded)
    with pytest.raises(UserError, match=message) as error:
        Checkpoint.open(sharded)
    one_line(error)


def test_wrong_paths_are_explained(tmp_path: Path):
    """Row 38."""
    (tmp_path / "llama-2").mkdir()
    (tmp_path / "llama-2" / "pytorch_model.bin").touch()
    (tmp_path / "file").touch()
    cases = {
        "lama-2": r"no such directory; did you mean 'llama-2'\?",
        "llama-2": r"no config.json.*holds pytorch_model.bin",
        "file": "a file; a checkpoint is a directory",
    }
    for name, message in cases.items():
        with pytest.raises(UserError, match=message) as error:
            Checkpoint.open(tmp_path / name)
        one_line(error)
    for text, message in {
        "{": r"config.json: not valid JSON: .* at line 1",
        "[]": "must be a JSON object, not list",
        "{}": r"no model.safetensors.*holds config.json, pytorch_model.bin",
    }.items():
        (tmp_path / "llama-2" / "config.json").write_text(text)
        with pytest.raises(UserError, match=message) as error:
            Checkpoint.open(tmp_path / "llama-2")
        one_line(error)


def test_empty_directory(tmp_path: Path):
    with pytest.raises(UserError, match="the directory holds nothing"):
        Checkpoint.open(tmp_path)


def test_fingerprint_sees_config_and_both_ends(sharded: Path, tmp_path: Path):
    """Row 20: a resumed run is refused if the model is another one."""
    original = Checkpoint.open(sharded).fingerprint()
    shutil.copytree(sharded, tmp_path / "copy")
    assert Checkpoint.open(tmp_path / "copy").fingerprint() == original
    file = shard(tmp_path / "copy", 0)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    changed = Checkpoint.open(tmp_path / "copy").fingerprint()
    config = tmp_path / "copy" / "config.json"
    config.write_text(config.read_text() + "\n")
    assert len({original, changed, Checkpoint.open(tmp_path / "copy").fingerprint()}) == 3


# Checking against the architecture


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_whole_models_pass(family: str, tmp_path: Path):
    checkpoint = Checkpoint.open(tiny_model(tmp_path / "model", family))
    check_tensors(checkpoint, read_spec(checkpoint.config))


def rewritten(tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], **config: object) -> Checkpoint:
    source = Checkpoint.open(tiny_model(tmp_path / "model"))
    tensors = {name: source.read(name) for name in source.names}
    change(tensors)
    write_checkpoint(tmp_path / "changed", tensors, source.config | config, sidecars_from=None)
    return Checkpoint.open(tmp_path / "changed")


BIAS = "model.layers.0.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "1 tensors missing: model.norm.weight"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"1 tensors wrong shape: .* is \[3\], not \[64\]"),
        (lambda t: t.update({BIAS: torch.ones(64)}), "1 tensors not part of the model: .*q_proj.bias"),
        (lambda t: [t.pop(name) for name in list(t) if "mlp" in name], r"6 tensors missing: .*, \.\.\."),
    ],
)
def test_other_models_are_refused(change: Callable, message: str, tmp_path: Path):
    checkpoint = rewritten(tmp_path, change)
    with pytest.raises(UserError, match=message) as error:
        check_tensors(checkpoint, read_spec(checkpoint.config))
    one_line(error)


def test_tied_heads_and_rotary_buffers_are_tolerated(tmp_path: Path):
    """Row 19: a tied head may be stored or not."""
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    for number, change in enumerate((lambda t: t.update(buffer), lambda t: t.pop("lm_head.weight"))):
        checkpoint = rewritten(tmp_path / str(number), change, tie_word_embeddings=True)
        check_tensors(checkpoint, read_spec(checkpoint.config))


# Writing


def test_shards_are_indexed_and_load_in_transformers(sharded: Path):
    index = json.loads((sharded / INDEX).read_text())
    checkpoint = Checkpoint.open(sharded)
    assert index["metadata"]["total_size"] == checkpoint.total_bytes
    assert set(index["weight_map"]) == set(checkpoint.names)
    assert all(file.stat().st_size < 125_000 for file in sharded.glob("*.safetensors"))
    state = AutoModelForCausalLM.from_pretrained(sharded).state_dict()
    assert all(torch.equal(state[name], checkpoint.read(name)) for name in checkpoint.names)
    assert all(file.stat().st_mode & 0o777 == 0o644 for file in sharded.iterdir())
    assert sharded.stat().st_mode & 0o777 == 0o755


def test_refs_and_tensors_give_equal_bytes(tmp_path: Path):
    source = Checkpoint.open(tiny_model(tmp_path / "model", dtype="bfloat16"))
    refs = {name: source.ref(name) for name in source.names}
    lazy = {
        name: LazyTensor(source.dtype(name), source.shape(name), lambda name=name: source.read(name))
        for name in reversed(source.names)
    }
    for name, tensors in {"refs": refs, "lazy": lazy}.items():
        write_checkpoint(tmp_path / name, tensors, source.config, source.path, max_shard_bytes=50_000)
    files = sorted(file.name for file in (tmp_path / "refs").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "lazy").iterdir())
    assert all((tmp_path / "refs" / file).read_bytes() == (tmp_path / "lazy" / file).read_bytes() for file in files)


def test_sidecars_travel_byte_for_byte(tmp_path: Path):
    """Row 17."""
    source = Checkpoint.open(tiny_model(tmp_path / "model"))
    kept = {
        "generation_config.json": b'{"eos_token_id": [1, 2]}',
        "chat_template.jinja": b"{{ messages }}\r\n",
        "modeling_extra.py": b"x = 1\n",
        "preprocessor_config.json": b"{}",
        "LICENSE": b"terms",
        "templates/tool.jinja": b"tool",
    }
    left = ["README.md", "pytorch_model.bin", "model.gguf", ".git/HEAD", ".cache/x", "original/params.json"]
    left += ["original/consolidated.00.pth", "pytorch_model.bin.index.json", "__pycache__/a.pyc", ".gitattributes"]
    for name, content in (kept | dict.fromkeys(left, b"no")).items():
        (source.path / name).parent.mkdir(exist_ok=True)
        (source.path / name).write_bytes(content)
    tensors = {name: source.ref(name) for name in source.names}
    write_checkpoint(tmp_path / "out", tensors, source.config | {"new": 1}, source.path)
    for name, content in kept.items():
        assert (tmp_path / "out" / name).read_bytes() == content
    assert not [name for name in left if (tmp_path / "out" / name).exists()]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source.path / name).read_bytes()
    assert Checkpoint.open(tmp_path / "out").config["new"] == 1


def test_nothing_appears_when_writing_fails(tmp_path: Path):
    def fail() -> torch.Tensor:
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        write_checkpoint(tmp_path / "out", {"a": LazyTensor(torch.float32, (2,), fail)}, {}, sidecars_from=None)
    assert list(tmp_path.iterdir()) == []


def test_existing_names_are_never_overwritten(tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "finished").mkdir()
    with pytest.raises(UserError, match="already exists"):
        write_checkpoint(tmp_path / "out", {}, {}, sidecars_from=None)
    with pytest.raises(UserError, match="already exists"):
        publish(tmp_path / "finished", tmp_path / "out")
    publish(tmp_path / "finished", tmp_path / "new")
    assert (tmp_path / "new").is_dir()


def test_copying_needs_no_memory(tmp_path: Path):
    """Row 5: 128 MB of tensors go from shard to shard, and are read one by one, within 64 MB of resident memory."""
    tensors = {f"t{i}": LazyTensor(torch.float32, (1 << 22,), lambda: torch.zeros(1 << 22)) for i in range(8)}
    write_checkpoint(tmp_path / "big", tensors, {}, sidecars_from=None)
    code = """
import resource, sys
from pathlib import Path
from compress.checkpoint import Checkpoint, write_checkpoint
path = Path(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
checkpoint = Checkpoint.open(path / "big")
write_checkpoint(path / "copy", {name: checkpoint.ref(name) for name in checkpoint.names}, {}, None, 50_000_000)
for name in checkpoint.names:
    checkpoint.read(name)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 64e6
