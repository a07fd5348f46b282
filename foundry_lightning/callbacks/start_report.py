"""Says before the first update what will be trained, and keeps it in the run folder."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import lightning
import rich
from lightning.pytorch.callbacks import Callback
from rich.markup import escape
from rich.table import Table

from foundry_lightning.facts import facts_of

_log = logging.getLogger(__name__)


class StartReport(Callback):
    """Finds the facts of the run on rank 0, shows and logs them, and writes `start_report.json`.

    Args:
        folder: Where the file goes; None: the Trainer's `default_root_dir`, an empty string: nowhere.
        show: Whether the table is printed.

    Attributes:
        facts: What was found (see `facts_of`); empty on other ranks.
    """

    def __init__(self, folder: str | Path | None = None, *, show: bool = True) -> None:
        self.folder = folder
        self.show = show
        self.facts: dict[str, Any] = {}

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Describes the run."""
        if not trainer.is_global_zero or not hasattr(trainer.datamodule, "order_settings"):  # type: ignore[attr-defined]
            return
        self.facts = facts_of(trainer, pl_module)
        folder = trainer.default_root_dir if self.folder is None else self.folder
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            text = json.dumps(self.facts, indent=2) + "\n"
            (Path(folder) / "start_report.json").write_text(text, encoding="utf-8")
        lines = _lines(self.facts)
        for name, text in lines:
            _log.info("%s: %s", name, text)
        for sentence in self.facts["warnings"]:
            _log.log(logging.INFO if self.show else logging.WARNING, sentence)  # what is shown is not said twice
        if self.show:
            table = Table(show_header=False, box=None, pad_edge=False)
            for line in lines:
                table.add_row(*map(escape, line))
            console = rich.get_console()
            console.print(table, highlight=False)
            for sentence in self.facts["warnings"]:
                console.print(f"[yellow]look at this:[/yellow] {escape(sentence)}", soft_wrap=True, highlight=False)


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, text) of what a person wants to know."""
    data, model, plan = facts["data"], facts["model"], facts["plan"]
    rows = "unknown (a stream)" if data["rows"] is None else f"{data['rows']:,}"
    if data.get("tokens") is not None:
        exact = data["sampled_rows"] == data["rows"]
        rows += f", {'' if exact else 'about '}{data['tokens']:,} tokens"
    if not data["sampled_rows"]:
        rows += "; not looked at, this iterator can be read once"
    elif data["sampled_rows"] != data["rows"]:
        rows += f"; the shares describe a sample of {data['sampled_rows']:,}"
    idle = f", {model['unreached_parameters']:,} that no loss reaches" if model["unreached_parameters"] else ""
    lines = [
        (
            "student",
            f"{model['student']}, {model['parameters']:,} parameters, {model['frozen_parameters']:,} frozen{idle}",
        ),
        ("data", data["source"]),
        ("rows", rows),
    ]
    names = {
        "padding": "padding",
        "cut": "texts cut",
        "cut_token": "tokens cut",
        "duplicate": "duplicates",
        "unknown": "unknown",
        "special": "special",
        "masked": "masked",
        "masked_at_end": "at the end",
    }
    found = [(text, data.get(f"{name}_share")) for name, text in names.items()]
    if shares := ", ".join(f"{text} {value:.1%}" for text, value in found if value is not None):
        lines.append(("shares", shares))
    updates = "until stopped" if plan["updates"] is None else f"{plan['updates']:,}"
    epochs = plan["epochs_planned"]
    passes = "" if epochs is None else f", {epochs:,.3g} pass{'es' * (epochs != 1)} over the data"
    tokens = "" if plan["tokens_planned"] is None else f", about {plan['tokens_planned']:,} tokens"
    lines.append(("updates", updates + passes + tokens))
    needed, free = (facts["memory"][f"memory_{name}"] for name in ("without_activations", "free"))
    free = "" if free is None else f"; {free / 2**20:,.0f} MiB are free now"
    text = f"{needed / 2**20:,.0f} MiB for weights, gradients and optimizer state; activations come on top{free}"
    lines.append(("memory", text))
    if "projection" in model:
        lines.append(("projection", model["projection"]))
    if facts["unigram_baseline"] is not None:
        lines.append(("unigram baseline", f"{facts['unigram_baseline']:.3f} nats on the validation data"))
    return lines
