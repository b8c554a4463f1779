"""Checkpoints of torch.distributed.checkpoint are read as torch wrote them; nothing in them is executed."""

from __future__ import annotations

import enum
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardwell.checkpoint.sources import DcpSource, open_source
from shardwell.errors import CheckpointError
from tests.support.checkpoint_samples import assert_same, everything
from tests.support.ranks import Ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Net(nn.Module):
    """Sizes that two ranks cannot share evenly, a weight of one row, a scalar, and an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 7)
        self.second = nn.Linear(7, 1)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))) * self.scale


def trained(model: nn.Module, steps: int = 3) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125, betas=(0.5, 0.75))
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        model(torch.randn(8, 4, generator=generator)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What a source should hold of them."""
    found = {f"model/{name}": tensor.detach() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"state/{name}/{key}"] = optimizer.state[parameter][key]
    return found


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Net, torch.optim.Optimizer]:
    """A checkpoint of one process with model and optimizer."""
    path = tmp_path_factory.mktemp("training")
    torch.manual_seed(0)
    model = Net()
    optimizer = trained(model)
    weights, state = get_state_dict(model, optimizer)
    dcp.save(
        {"model": weights, "optim": state, "extra": torch.ones(2), "note": "hello"}, checkpoint_id=path, no_dist=True
    )
    return path, model, optimizer


def save(path: Path, content: dict[str, Any], **planner: Any) -> Path:
    dcp.save(content, checkpoint_id=path, planner=dcp.DefaultSavePlanner(**planner), no_dist=True)
    return path


# --- what is read -----------------------------------------------------------------------------------------------


def test_model_and_optimizer_are_read_as_they_were_saved(training: tuple[Path, Net, torch.optim.Optimizer]) -> None:
    path, model, optimizer = training
    source = open_source(path)
    assert isinstance(source, DcpSource)
    assert_same(everything(source), state_of(model, optimizer))
    for name, _ in model.named_parameters():
        assert source.values[f"scalar/{name}/step"] == 3.0
    group = source.values["param_groups"][0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.125, [0.5, 0.75], 0.01)
    assert sorted(group["params"]) == sorted(name for name, _ in model.named_parameters())
    assert source.ignored == ["extra", "note"]


def test_a_flattened_optimizer_is_read_too(tmp_path: Path) -> None:
    model = Net()
    optimizer = trained(model)
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    source = DcpSource(save(tmp_path, {"model": weights, "optimizer": state}))
    assert_same(everything(source), state_of(model, optimizer))
    assert source.values["scalar/first.weight/step"] == 3.0


def test_a_step_count_that_is_no_tensor_is_a_scalar(tmp_path: Path) -> None:
    content = {"model": {"w": torch.ones(2)}, "optim": {"state": {"w": {"step": 5, "mean": torch.zeros(2)}}}}
    source = DcpSource(save(tmp_path, content))
    assert source.values == {"scalar/w/step": 5}
    assert list(source.tensors) == ["model/w", "state/w/mean"]


def test_the_state_of_a_parameter_without_dimensions_is_a_tensor_but_for_its_step(
    training: tuple[Path, Net, torch.optim.Optimizer],
) -> None:
    source = DcpSource(training[0])
    assert source.tensors["state/scale/exp_avg"].shape == ()
    assert "state/scale/step" not in source.tensors
    assert source.values["scalar/scale/step"] == 3.0


LLAMA = {"model.embed.weight": torch.randn(3, 2), "model.norm.weight": torch.randn(2), "lm_head.weight": torch.ones(2)}


@pytest.mark.parametrize("flatten", [True, False])
def test_a_bare_state_dict_is_a_model_even_if_its_names_begin_with_model(tmp_path: Path, flatten: bool) -> None:
    source = DcpSource(save(tmp_path, dict(LLAMA), flatten_state_dict=flatten))
    assert_same(everything(source), {f"model/{name}": tensor for name, tensor in LLAMA.items()})


def test_names_that_all_begin_with_model_are_told_apart_by_how_they_were_nested(tmp_path: Path) -> None:
    bare = {name: tensor for name, tensor in LLAMA.items() if name.startswith("model.")}
    source = DcpSource(save(tmp_path / "bare", dict(bare)))
    assert list(source.tensors) == ["model/model.embed.weight", "model/model.norm.weight"]
    nested = {"model": {name.removeprefix("model."): tensor for name, tensor in bare.items()}}
    source = DcpSource(save(tmp_path / "nested", nested))
    assert list(source.tensors) == ["model/embed.weight", "model/norm.weight"]


def test_a_training_state_inside_an_application_is_found(tmp_path: Path) -> None:
    content = {"app": {"model": {"a.b": torch.ones(2)}, "optim": {"state": {"a.b": {"m": torch.zeros(2)}}}}}
    source = DcpSource(save(tmp_path, content))
    assert list(source.tensors) == ["model/a.b", "state/a.b/m"]


def test_states_go_to_the_parameter_with_the_longest_name(tmp_path: Path) -> None:
    content = {
        "model": {"a": torch.ones(1), "a.b": torch.ones(2)},
        "optim": {"state": {"a": {"m": torch.ones(1)}, "a.b": {"m": torch.ones(2), "deep": {"l": torch.ones(3)}}}},
    }
    source = DcpSource(save(tmp_path, content))
    assert list(source.tensors) == ["model/a", "model/a.b", "state/a/m", "state/a.b/m", "state/a.b/deep.l"]


def test_every_dtype_order_and_shape_is_read(tmp_path: Path) -> None:
    base = torch.randn(4, 6)
    content = {
        "transposed": base.t(),
        "slice": base[1:3, 2:5],
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "double": torch.randn(3, dtype=torch.float64),
        "half": torch.randn(3).half(),
        "bf16": torch.randn(3).bfloat16(),
        "int": torch.arange(5, dtype=torch.int32),
        "bool": torch.tensor([True, False]),
        "fp8": torch.randn(4).to(torch.float8_e4m3fn).view(torch.uint8),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
    }
    source = DcpSource(save(tmp_path, dict(content)))
    assert_same(everything(source), {f"model/{name}": tensor for name, tensor in content.items()})
    for name, tensor in content.items():
        flat = tensor.contiguous().view(-1)
        for start in range(0, flat.numel(), 7):
            assert torch.equal(
                source.read(f"model/{name}", start, min(start + 5, flat.numel())), flat[start : start + 5]
            )


def test_only_the_bytes_asked_for_are_read(tmp_path: Path) -> None:
    source = DcpSource(save(tmp_path, {"w": torch.arange(1000.0)}))
    assert source.bytes_read == 0
    assert source.read("model/w", 500, 503).tolist() == [500.0, 501.0, 502.0]
    assert source.bytes_read == 12
    with pytest.raises(CheckpointError, match="has 1000 elements, asked for 5 to 1001"):
        source.read("model/w", 5, 1001)
    with pytest.raises(CheckpointError, match="tensor 'model/v': not in this checkpoint"):
        source.read("model/v", 0, 0)


# --- saved by several ranks -------------------------------------------------------------------------------------


def save_fsdp2(path: str) -> dict[str, Any]:
    """Trains with FSDP2, saves, and returns the whole tensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Net()
    model.scale = nn.Parameter(torch.ones(1))  # FSDP2 cannot split what has no dimension
    fully_shard(model, mesh=mesh)
    optimizer = trained(model)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=path)
    return {name: _whole(tensor) for name, tensor in state_of(model, optimizer).items()}


def save_columns(path: str) -> dict[str, Any]:
    """Tensors that are cut along other dimensions than the first."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    whole = {"wide": torch.randn(6, 5, generator=generator), "deep": torch.randn(3, 4, 3, generator=generator)}
    content = {"wide": Shard(1), "deep": Shard(2)}
    dcp.save({name: distribute_tensor(whole[name], mesh, [cut]) for name, cut in content.items()}, checkpoint_id=path)
    return {f"model/{name}": tensor for name, tensor in whole.items()}


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def from_ranks(ranks: Ranks, save: Callable[[str], Any], path: Path) -> tuple[DcpSource, dict[str, Tensor]]:
    expected = ranks.run(2, save, str(path))[0]
    assert {"__0_0.distcp", "__1_0.distcp"} <= set(os.listdir(path))
    return DcpSource(path), {name: torch.from_numpy(array) for name, array in expected.items()}


@pytest.mark.slow
def test_what_fsdp2_saves_from_two_ranks_is_read_whole_and_in_part(ranks: Ranks, tmp_path: Path) -> None:
    source, expected = from_ranks(ranks, save_fsdp2, tmp_path)
    assert_same(everything(source), expected)
    assert source.values["scalar/first.weight/step"] == 3.0
    assert source.values["param_groups"][0]["lr"] == 0.125
    flat = expected["model/first.weight"].reshape(-1)  # 7 rows of 4, cut after row 4
    for start in range(29):
        for stop in range(start, 29):
            assert torch.equal(source.read("model/first.weight", start, stop), flat[start:stop])


def test_a_rank_that_did_not_save_what_is_asked_for_is_not_touched(ranks: Ranks, tmp_path: Path) -> None:
    source, expected = from_ranks(ranks, save_fsdp2, tmp_path)
    before = source.bytes_read
    flat = expected["model/first.weight"].reshape(-1)
    (tmp_path / "__1_0.distcp").rename(tmp_path / "away")
    source.close()
    assert torch.equal(source.read("model/first.weight", 2, 16), flat[2:16])
    assert source.bytes_read - before == 14 * 4
    with pytest.raises(CheckpointError, match=r"__1_0.distcp: cannot be read"):
        source.read("model/first.weight", 2, 17)


def test_tensors_that_are_cut_along_other_dimensions_are_put_together(ranks: Ranks, tmp_path: Path) -> None:
    source, expected = from_ranks(ranks, save_columns, tmp_path)
    assert_same(everything(source), expected)
    for name, tensor in expected.items():
        flat = tensor.reshape(-1)
        for start in range(0, len(flat), 3):
            for stop in range(start, len(flat) + 1, 2):
                assert torch.equal(source.read(name, start, stop), flat[start:stop])
    before = source.bytes_read
    source.read("model/wide", 11, 13)  # two elements, from rows 2 of 6
    assert source.bytes_read - before == 5 * 4


# --- what is refused --------------------------------------------------------------------------------------------


def change(path: Path, edit: Callable[[Metadata], object]) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    edit(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return save(tmp_path, {"w": torch.arange(6.0)})


class Evil:
    """A pickle of it makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_class_that_is_not_listed_is_named_and_not_called(single: Path) -> None:
    done = single / "done"
    change(single, lambda metadata: setattr(metadata, "planner_data", Evil(done)))
    with pytest.raises(CheckpointError, match=r"\.metadata: names 'posix.mkdir', which is not among the classes"):
        DcpSource(single)
    assert not done.exists()
    pickle.loads((single / ".metadata").read_bytes())
    assert done.exists()  # the file was a weapon


class Reaching:
    """Pickled as an attribute of something."""

    def __init__(self, of: Any, name: str) -> None:
        self.of, self.name = of, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.of, self.name)


def test_members_of_enumerations_as_some_versions_of_python_pickle_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3.11.0 to 3.11.3, and with them Debian 12, name them as attributes of their class."""
    by_name = lambda self, protocol: (getattr, (self.__class__, self._name_))  # noqa: E731
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", by_name)
    path = save(tmp_path / "dcp", {"w": torch.arange(6.0)})
    assert b"getattr" in (path / ".metadata").read_bytes()
    assert torch.equal(DcpSource(path).read("model/w", 0, 6), torch.arange(6.0))


@pytest.mark.parametrize("of", [Metadata, torch.Size, "text", {}], ids=str)
def test_attributes_of_anything_else_are_refused(single: Path, of: Any) -> None:
    change(single, lambda metadata: setattr(metadata, "planner_data", Reaching(of, "__class__")))
    with pytest.raises(
        CheckpointError, match=r"\.metadata: damaged, .*an attribute of something that is no enumeration"
    ):
        DcpSource(single)


def test_a_pickle_inside_a_data_file_is_not_executed_either(tmp_path: Path) -> None:
    done = tmp_path / "done"
    path = save(tmp_path / "dcp", {"w": torch.arange(6.0)})
    with (path / "__0_0.distcp").open("wb") as file:
        torch.save(Evil(done), file)
        length = file.tell()
    change(path, lambda metadata: [setattr(info, "length", length) for info in metadata.storage_data.values()])
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: tensor 'model/w': data.pkl: names 'posix.mkdir'"):
        DcpSource(path).read("model/w", 0, 6)
    assert not done.exists()


def test_a_number_that_is_a_pickle_of_something_else_is_refused(tmp_path: Path) -> None:
    done = tmp_path / "done"
    content = {"model": {"w": torch.ones(2)}, "optim": {"state": {"w": {"step": Evil(done)}}}}
    path = save(tmp_path / "dcp", content)
    with pytest.raises(CheckpointError, match=r"'optim.state.w.step': names 'posix.mkdir'"):
        DcpSource(path)
    assert not done.exists()


def test_a_pickle_cannot_change_what_stands_for_a_class(single: Path) -> None:
    text = b"ctorch\nSize\n(N}X\x08\x00\x00\x00__code__K\x01stb."  # a state for the class itself
    (single / ".metadata").write_bytes(text)
    with pytest.raises(CheckpointError, match="sets the state of a value that has none"):
        DcpSource(single)


def test_the_metadata_of_older_versions_is_read(single: Path) -> None:
    def old(metadata: Metadata) -> None:
        for record in metadata.state_dict_metadata.values():
            record.properties = OldProperties(dtype=torch.float32)
        metadata.storage_meta.checkpoint_id = Path("/somewhere")
        del metadata.version

    change(single, old)
    assert DcpSource(single).read("model/w", 0, 6).tolist() == [0, 1, 2, 3, 4, 5]


def _info(metadata: Metadata) -> Any:
    return next(iter(metadata.storage_data.values()))


def _tensor(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata["w"]


EDITS: list[tuple[Callable[[Metadata], object], str]] = [
    (lambda m: setattr(_info(m), "relative_path", "../x"), 'expected the plain name of a file .* found "../x"'),
    (lambda m: setattr(_info(m), "relative_path", "/etc/passwd"), "expected the plain name of a file"),
    (lambda m: setattr(_info(m), "relative_path", "__9_0.distcp"), "__9_0.distcp: missing"),
    (lambda m: setattr(_info(m), "offset", -1), "expected the plain name of a file and two sizes"),
    (lambda m: setattr(_info(m), "offset", 10), r"__0_0.distcp: truncated: [0-9]+ bytes, but .*\"w\" ends at byte"),
    (lambda m: setattr(_info(m), "length", 2**62), "truncated"),
    (lambda m: setattr(_info(m), "length", 20), "larger than its bytes"),
    (lambda m: setattr(_info(m), "transform_descriptors", ["zstd"]), "written through an extension"),
    (lambda m: m.storage_data.clear(), "is in no file"),
    (lambda m: setattr(m, "storage_data", None), "storage_data: expected a dictionary"),
    (lambda m: setattr(_tensor(m), "size", torch.Size([7])), "more or fewer elements than the tensor"),
    (lambda m: setattr(_tensor(m), "size", torch.Size([2**40])), "more or fewer elements than the tensor"),
    (lambda m: setattr(_tensor(m), "size", (-6,)), "shape: expected a list"),
    (lambda m: setattr(_tensor(m), "chunks", [3]), "expected a chunk, found 3"),
    (lambda m: setattr(_tensor(m).chunks[0], "sizes", torch.Size([8])), r"a chunk of \[8\] at \[0\] is outside"),
    (lambda m: setattr(_tensor(m).chunks[0], "offsets", ("x",)), "is outside"),
    (lambda m: setattr(_tensor(m), "properties", None), "expected a dtype"),
    (lambda m: m.state_dict_metadata.update(w=3), "expected the metadata of a tensor"),
]


@pytest.mark.parametrize(("edit", "message"), EDITS)
def test_metadata_that_lies_is_refused(single: Path, edit: Callable[[Metadata], object], message: str) -> None:
    change(single, edit)
    with pytest.raises(CheckpointError, match=message):
        DcpSource(single)


def test_chunks_that_overlap_and_leave_a_gap_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, save_columns, str(tmp_path / "columns"))
    change(
        tmp_path / "columns", lambda m: setattr(m.state_dict_metadata["wide"].chunks[1], "offsets", torch.Size([0, 2]))
    )
    change(tmp_path / "columns", lambda m: m.storage_data.update(_moved(m, "wide", (0, 3), (0, 2))))
    with pytest.raises(CheckpointError, match="tensor 'model/wide': some of its elements were not saved"):
        DcpSource(tmp_path / "columns").read("model/wide", 0, 30)
    ranks.run(2, save_fsdp2, str(tmp_path / "rows"))
    name = "model.first.weight"
    change(tmp_path / "rows", lambda m: setattr(m.state_dict_metadata[name].chunks[1], "offsets", torch.Size([3, 0])))
    change(tmp_path / "rows", lambda m: m.storage_data.update(_moved(m, name, (4, 0), (3, 0))))
    with pytest.raises(CheckpointError, match="elements 16 to 12 are in no chunk, or in two"):
        DcpSource(tmp_path / "rows")


def _moved(metadata: Metadata, name: str, old: tuple[int, ...], new: tuple[int, ...]) -> dict[Any, Any]:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    return {MetadataIndex(name, new): metadata.storage_data[MetadataIndex(name, old)]}


def test_a_box_that_is_not_what_the_metadata_says_is_refused(single: Path) -> None:
    change(single, lambda metadata: setattr(_tensor(metadata).properties, "dtype", torch.int32))
    with pytest.raises(CheckpointError, match=r"'model/w': expected torch.int32 \[6\], found torch.float32 \[6\]"):
        DcpSource(single).read("model/w", 0, 1)


def test_a_file_that_is_cut_after_it_was_opened_is_an_error(single: Path) -> None:
    source = DcpSource(single)
    os.truncate(single / "__0_0.distcp", 100)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp"):
        source.read("model/w", 0, 6)


def test_random_damage_gives_errors_of_ours_or_numbers(tmp_path: Path) -> None:
    content = {"model": {"a.b": torch.ones(2)}, "optim": {"state": {"a.b": {"m": torch.zeros(2), "step": 5}}}}
    path = save(tmp_path, content)
    chance = random.Random(0)
    errors = 0
    for name in (".metadata", "__0_0.distcp"):
        good = (path / name).read_bytes()
        for _ in range(300):
            bad = bytearray(good)
            for _ in range(chance.choice((1, 1, 4))):
                bad[chance.randrange(len(bad))] = chance.randrange(256)
            (path / name).write_bytes(bad[: chance.choice((len(bad), len(bad), chance.randrange(len(bad))))])
            try:
                everything(DcpSource(path))
            except CheckpointError:
                errors += 1
        (path / name).write_bytes(good)
    assert errors > 200
    assert_same(everything(DcpSource(path)), {"model/a.b": torch.ones(2), "state/a.b/m": torch.zeros(2)})
