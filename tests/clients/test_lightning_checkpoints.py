"""Checkpoints of Lightning's Trainer on a shardwell strategy: resumed at any number of ranks, kept, converted."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import shardwell.integrations.lightning as own
from shardwell import CheckpointError, ShardwellError
from tests.support import lightning_runs as runs
from tests.support.ranks import Ranks


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One epoch on two ranks: a file of DDP's, and folders of stages 1 and 3."""
    folder = tmp_path_factory.mktemp("saved")
    cases: dict[str, dict[str, Any] | None] = {"ddp": None, "1": {"stage": 1}, "3": {"stage": 3}}
    paths = {name: str(folder / f"{name}.ckpt") for name in cases}
    for name, arguments in cases.items():
        ranks.run(2, runs.leg, arguments, 1, paths[name], None)
    return paths


def assert_same(mine: Any, theirs: Any) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert one["steps"] == other["steps"]
        for key in ("losses", "norms", "rates"):
            np.testing.assert_allclose(one[key], other[key], rtol=5e-6, atol=5e-6, err_msg=key)
        for name, value in other["weights"].items():
            np.testing.assert_allclose(one["weights"][name], value, rtol=5e-6, atol=5e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_fit_goes_on_at_another_number_of_ranks_as_on_ddp(
    ranks: Ranks, saved: dict[str, str], num_ranks: int
) -> None:
    theirs = ranks.run(num_ranks, runs.leg, None, 2, None, saved["ddp"])
    assert len(theirs[0]["losses"]) == 48 // 4 // num_ranks  # of the second epoch alone
    assert_same(ranks.run(num_ranks, runs.leg, {"stage": 3}, 2, None, saved["3"]), theirs)
    if num_ranks == 3:  # and from another stage
        assert_same(ranks.run(num_ranks, runs.leg, {"stage": 2}, 2, None, saved["3"]), theirs)
        assert_same(ranks.run(num_ranks, runs.leg, {"stage": 3}, 2, None, saved["1"]), theirs)


def from_a_file(path: str) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        L.seed_everything(4, verbose=False)
        module = runs.Regression(schedule="step")
        run = runs.trainer(own.ShardwellStrategy(stage=3, config=runs.SHARDED), max_epochs=1)
        tested = run.test(module, runs.loader(16), ckpt_path=path, verbose=False, weights_only=False)
        run.fit(module, runs.loader(48), ckpt_path=path, weights_only=False)  # its one epoch is over
    found = runs.seen(module, run)
    own.release(module)
    return {**found, "test": tested[0]["test"], "warnings": [str(one.message) for one in caught]}


@pytest.mark.slow
def test_weights_of_a_file_of_another_strategy_are_loaded(ranks: Ranks, saved: dict[str, str]) -> None:
    found = ranks.run(2, from_a_file, saved["ddp"])
    weights = torch.load(saved["ddp"], weights_only=False)["state_dict"]
    for name, value in weights.items():
        np.testing.assert_allclose(found[1]["weights"][name], value.numpy(), err_msg=name)
    assert not any("optimizer" in words for words in found[0]["warnings"])


def adam_leg(arguments: dict[str, Any] | None, epochs: int, save: str | None, resume: str | None) -> dict[str, Any]:
    """Train with Adam up to an epoch, from a checkpoint or from the start, and save one."""
    warnings.simplefilter("ignore")
    L.seed_everything(3, verbose=False)
    module = runs.Regression(optimizer="adam", lr=0.01)
    run = runs.trainer(runs.strategy_of(arguments), max_epochs=epochs)
    run.fit(module, runs.loader(48), ckpt_path=resume, weights_only=False)
    if save is not None:
        run.save_checkpoint(save)
    found = runs.seen(module, run)
    own.release(module)
    return found


def adam_legs(path: str) -> list[dict[str, Any]]:
    adam_leg(None, 1, path, None)
    offloaded = {"stage": 2, "offload_optimizer": True}
    return [adam_leg(one, 2, None, path) for one in (None, {"stage": 1}, {"stage": 3}, offloaded)]


def test_a_fit_goes_on_from_a_file_of_ddp_with_its_optimizer_state(ranks: Ranks, tmp_path: Path) -> None:
    theirs, *mine = ranks.run(2, adam_legs, str(tmp_path / "ddp.ckpt"))[0]
    for one in mine:
        assert_same([one], [theirs])


def with_weights_alone(folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    L.seed_everything(3, verbose=False)
    module = runs.Regression(optimizer="adam", lr=0.01)
    keep = ModelCheckpoint(folder, "best", monitor="val", save_weights_only=True)
    strategy = own.ShardwellStrategy(stage=3, config=runs.SHARDED)
    run = runs.trainer(strategy, max_epochs=2, enable_checkpointing=True, callbacks=[keep])
    run.fit(module, runs.loader(), runs.loader(16))
    found = {"test": run.test(ckpt_path="best", dataloaders=runs.loader(16), verbose=False)[0]["test"]}
    found["best"] = float(keep.best_model_score)
    own.release(module)
    return found


def test_weights_alone_are_a_file_of_lightnings(ranks: Ranks, tmp_path: Path) -> None:
    found, _ = ranks.run(2, with_weights_alone, str(tmp_path))
    assert found["test"] == pytest.approx(found["best"])
    model = runs.Regression.load_from_checkpoint(tmp_path / "best.ckpt", weights_only=True)
    assert model.hparams["optimizer"] == "adam"
    with torch.no_grad():
        loss = torch.nn.functional.mse_loss(model(runs.samples(16).tensors[0]), runs.samples(16).tensors[1])
    assert float(loss) == pytest.approx(found["test"], rel=1e-4)
    assert not {"optimizer_states", "lr_schedulers"} & torch.load(tmp_path / "best.ckpt", weights_only=True).keys()


def test_a_folder_becomes_one_file_of_lightnings(saved: dict[str, str], tmp_path: Path) -> None:
    file = own.convert_checkpoint(saved["3"], tmp_path / "one.ckpt")
    model = runs.Regression.load_from_checkpoint(file, weights_only=True)
    assert model.hparams["schedule"] == "step"
    expected = torch.load(saved["ddp"], weights_only=False)["state_dict"]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=5e-6, atol=5e-6)
    with pytest.raises(CheckpointError, match="exists"):
        own.convert_checkpoint(saved["3"], file)


class Hooked(runs.Regression):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.names = sorted(checkpoint["state_dict"])
        checkpoint["of the user"] = {"numbers": torch.arange(3), 4: (1.5, "five")}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["of the user"]
        self.names_loaded = sorted(checkpoint["state_dict"])


class Dropping(runs.Regression):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["net.0.weight"]


def with_callbacks(folder: str) -> dict[str, Any]:
    """Keep the best of three epochs and the last; test and predict with the best; let hooks look."""
    warnings.simplefilter("ignore")
    L.seed_everything(3, verbose=False)
    module = Hooked()
    keep = ModelCheckpoint(folder, "{epoch}", monitor="val", save_top_k=1, save_last=True)
    run = runs.trainer(
        own.ShardwellStrategy(stage=3, config=runs.SHARDED),
        max_epochs=3,
        enable_checkpointing=True,
        callbacks=[keep],
    )
    run.fit(module, runs.loader(), runs.loader(16))
    found: dict[str, Any] = {
        "files": sorted(path.name for path in Path(folder).iterdir()),
        "after fit": float(run.callback_metrics["val"]),
        "best": float(keep.best_model_score),
        "test": run.test(ckpt_path="best", dataloaders=runs.loader(16), verbose=False)[0]["test"],
        "validate": run.validate(module, runs.loader(16), verbose=False)[0]["val"],
        "predicted": len(run.predict(module, runs.loader(16))),
        "names": module.names,
    }
    again = Hooked()
    keeps = {"enable_checkpointing": True, "default_root_dir": f"{folder}/runs"}
    second = runs.trainer(own.ShardwellStrategy(stage=2), max_epochs=4, **keeps)
    second.fit(again, runs.loader(), runs.loader(16), ckpt_path=f"{folder}/last.ckpt", weights_only=False)
    found["epochs"] = second.current_epoch
    found["hooked"] = again.loaded["numbers"], again.loaded[4], again.names_loaded == module.names
    third = runs.trainer(own.ShardwellStrategy(stage=2), max_epochs=1, **keeps)
    dropping = Dropping()
    try:
        third.fit(dropping, runs.loader(8))
        third.save_checkpoint(f"{folder}/dropped.ckpt")
        found["dropped"] = ""
    except ShardwellError as error:
        found["dropped"] = str(error)
    for one in (module, again, dropping):
        own.release(one)
    return found


@pytest.mark.slow
def test_callbacks_and_hooks_work_on_folders(ranks: Ranks, tmp_path: Path) -> None:
    found, _ = ranks.run(2, with_callbacks, str(tmp_path))
    assert len(found["files"]) == 2  # the folders of worse epochs are removed
    assert found["files"][1] == "last.ckpt"
    assert (tmp_path / "last.ckpt" / "checkpoint").is_dir()
    assert found["test"] == pytest.approx(found["best"]) != found["after fit"]
    assert found["validate"] == pytest.approx(found["best"])
    assert found["predicted"] == 2
    assert len(found["names"]) == 12
    assert found["epochs"] == 4
    numbers, pair, same = found["hooked"]
    assert list(numbers) == [0, 1, 2]
    assert (pair, same) == ((1.5, "five"), True)
    assert "exclude_frozen_parameters" in found["dropped"]
