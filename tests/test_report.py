"""The report: what is read of run folders, and the page and PNGs that show it."""

from __future__ import annotations

import html
import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

pytest.importorskip("matplotlib")
from matplotlib.image import imread

from foundry_lightning.commands import main
from foundry_lightning.report import write_report
from foundry_lightning.report.page import page
from foundry_lightning.report.plots import axes_of, panels_of
from foundry_lightning.report.runs import read_runs

EVIL = "<script>document.title='taken'</script>"


def metrics(*rows: dict, file: str = "metrics.csv", folder: str = "runs/mlm/1") -> None:
    """Writes rows as Lightning's CSVLogger does: all columns, empty where a row has no value."""
    columns = sorted({name for row in rows for name in row})
    lines = [",".join(columns), *(",".join(str(row.get(name, "")) for name in columns) for row in rows)]
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, file).write_text("".join(f"{line}\r\n" for line in lines), newline="")


def a_run(folder: str = "runs/mlm/1", *, every: int = 10, count: int = 12, distil: bool = False, rate=1e-3) -> str:
    """A run folder with all that a run leaves; an evaluation at each second logged step."""
    rows, samples = [], []
    for n in range(1, count + 1):
        step, loss = n * every, 7 - 4 * n / count
        where = {"step": step, "progress/tokens": step * 1000, "progress/seconds": step * 30.0}
        terms = {"loss": loss, "mlm": loss} | (
            {"loss": 3 * loss, "distill": loss / 3, "cosine": 1 / n} if distil else {}
        )
        more = {"learning_rate": rate * n, "grad_norm": 3 - n / count, "tokens_per_second": 900 + 50 * n}
        rows.append(where | {f"train/{name}": value for name, value in (terms | more).items()})
        if n % 2 == 0:
            more = {"perplexity": 2**loss, "masked_accuracy": n / count / 2}
            rows.append(where | {f"val/{name}": value for name, value in (terms | more).items()})
            guesses = [["mat", n / count], ["rug", 0.05], [EVIL, 0.01]]
            sample = {"before": f"the cat {EVIL} sat on a ", "word": "mat", "after": " all day", "guesses": guesses}
            samples.append(json.dumps({"step": step, "samples": [sample]}))
    metrics(*rows, folder=folder)
    Path(folder, "samples.jsonl").write_text("\n".join(samples) + "\n")
    facts = {
        "data": {"source": "texts.txt"},
        "model": {"student": "BertForMaskedLM", "parameters": 1_454_339},
        "plan": {"updates": every * count},
        "unigram_baseline": 6.0,
        "warnings": [f"12% of the rows are duplicates {EVIL}"],
    }
    Path(folder, "start_report.json").write_text(json.dumps(facts))
    model = {"class_path": "MLMLitModule", "init_args": {"config": {"learning_rate": rate, "seed": 1}}}
    Path(folder, "config.yaml").write_text(yaml.safe_dump({"model": model, "run_name": folder}))
    return folder


def points(text: str, curve: str) -> int:
    """The number of points of a curve's path in the page."""
    (path,) = re.findall(rf'<g id="{curve}">\s*<path d="([^"]*)"', text)
    return len(re.findall("[ML]", path))


# ------------------------------------------------------------------ reading


def test_a_step_done_again_after_a_resume_counts_once_with_its_later_value():
    metrics({"step": 10, "train/loss": 5}, {"step": 20, "train/loss": 4.5}, file="metrics.part1.csv")
    metrics({"step": 20, "train/loss": 4}, {"step": 20, "val/loss": 4.2}, file="metrics.part2.csv")
    metrics({"step": 30, "train/loss": 3})
    (run,) = read_runs(["runs/mlm/1"])
    assert run.metrics == {"train/loss": {10: 5, 20: 4, 30: 3}, "val/loss": {20: 4.2}}


def test_the_tenth_resume_comes_after_the_second():
    metrics({"step": 10, "train/loss": 1}, file="metrics.part10.csv")
    metrics({"step": 10, "train/loss": 2}, file="metrics.part2.csv")
    metrics({"step": 20, "train/loss": 3})
    assert read_runs(["runs/mlm/1"])[0].metrics["train/loss"] == {10: 1, 20: 3}


def test_what_a_resume_from_an_earlier_step_has_not_reached_again_is_not_shown():
    metrics(*({"step": step, "train/loss": 5} for step in (10, 20, 30, 40)), file="metrics.part1.csv")
    metrics({"step": 25, "train/loss": 4})
    assert read_runs(["runs/mlm/1"])[0].metrics["train/loss"] == {10: 5, 20: 5, 25: 4}


def test_lines_that_a_kill_has_cut_are_left_out_and_named():
    metrics({"step": 10, "train/loss": 5, "train/mlm": 5}, {"step": 20, "train/loss": 4, "train/mlm": 4})
    file = Path("runs/mlm/1/metrics.csv")
    whole = file.read_bytes()
    for cut, left in ((whole[:-2], 1), (whole[:-5], 1), (whole + b"30,4", 2), (whole + b"\0\0\xff,\n", 2)):
        file.write_bytes(cut)
        (run,) = read_runs(["runs/mlm/1"])
        assert len(run.metrics["train/loss"]) == left
        assert any("of metrics.csv is not whole and is left out" in note for note in run.notes)


def test_values_that_are_not_finite_leave_a_gap_and_are_named():
    metrics(*({"step": n, "train/loss": value} for n, value in enumerate((5, "nan", "inf", 4, 3), start=1)))
    (run,) = read_runs(["runs/mlm/1"])
    assert "train/loss is not finite at step 2, 3: the curve has a gap there." in run.notes
    text = page([run])
    assert points(text, "curve-loss-steps-train-0") == 3
    assert "not finite at step 2, 3" in text


def test_a_folder_of_numbered_runs_means_the_newest():
    for number in (2, 10):
        a_run(f"runs/mlm/{number}")
    Path("runs/mlm/export").mkdir()
    Path("runs/mlm/11").mkdir()  # refused before its first step
    assert [run.name for run in read_runs(["runs/mlm", "runs/mlm/2"])] == ["mlm/10", "mlm/2"]


def test_runs_of_the_same_name_get_names_that_differ():
    places = [a_run(f"{above}/mlm/1") for above in ("here", "there")]
    assert [run.name for run in read_runs(places)] == ["here/mlm/1", "there/mlm/1"]


def test_broken_samples_report_and_config_are_named_and_the_rest_is_shown():
    folder = Path(a_run())
    with open(folder / "samples.jsonl", "a") as file:
        file.write('{"step": 20, "samples": []}\n{"step": 30, "sam\n[1]\n')
    (folder / "start_report.json").write_text('{"data": ')
    (folder / "config.yaml").write_text("a: [\n")
    (run,) = read_runs([folder])
    assert run.samples[20] == []  # the later line of a step
    assert len(run.samples) == 6
    assert [note for note in run.notes if "samples.jsonl" in note] == [
        f"line {n} of samples.jsonl is not whole and is left out." for n in (8, 9)
    ]
    assert {f"{name} cannot be read: what it holds is not shown." for name in ("start_report.json", "config.yaml")} < {
        *run.notes
    }
    assert "curve-mlm-steps-val-0" in page([run])


# ------------------------------------------------------------------ the page


def test_every_quantity_is_drawn_against_every_axis_with_all_its_points():
    text = page(read_runs([a_run(distil=True)]))
    train = ("loss", "mlm", "distill", "cosine", "learning_rate", "grad_norm", "throughput")
    for axis in ("steps", "tokens", "time"):
        assert {panel: points(text, f"curve-{panel}-{axis}-train-0") for panel in train} == dict.fromkeys(train, 12)
        val = ("loss", "mlm", "distill", "cosine", "perplexity", "accuracy")
        assert {panel: points(text, f"curve-{panel}-{axis}-val-0") for panel in val} == dict.fromkeys(val, 6)
        assert set(re.findall(rf'"baseline-(\w+)-{axis}-0"', text)) == {"mlm", "perplexity"}


def test_the_total_of_one_term_is_not_drawn_beside_it():
    assert "loss" not in [panel.name for panel in panels_of(read_runs([a_run()]))]
    assert "loss" in [panel.name for panel in panels_of(read_runs([a_run("distil", distil=True)]))]


def test_runs_are_overlaid_in_colours_of_their_own_and_their_settings_compared():
    runs = read_runs([a_run(), a_run("runs/mlm/2", count=6, rate=5e-3)])
    text = page(runs)
    assert [points(text, f"curve-mlm-steps-train-{n}") for n in (0, 1)] == [12, 6]
    for panel, kind in (("mlm", "train"), ("perplexity", "val"), ("learning_rate", "train")):
        found = [
            re.findall(rf'"curve-{panel}-steps-{kind}-{n}">\s*<path[^>]*stroke: (#\w+)', text)[0].lower()
            for n in (0, 1)
        ]
        assert found == re.findall(r'<td class="run" style="--run:(#\w+)"', text)[:2]
    settings = text[text.index("Settings that differ") :]
    assert "<th>model.config.learning_rate</th><td>0.001</td><td>0.005</td>" in settings
    assert "seed" not in settings
    assert "run_name" not in settings
    assert "6.0000" in text


def test_text_of_runs_is_escaped_and_the_page_loads_nothing():
    text = page(read_runs([a_run(f"runs/{EVIL.replace('/', '')}/1")]))
    assert text.count("<script>") == text.count("</script>") == 1  # the page's own
    assert text.count(html.escape(EVIL)) >= 3
    assert not re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?!#|["']?#)\w""", text)
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]*)', text)) <= set(ids)


def test_samples_show_the_hidden_word_and_the_guesses_over_time():
    text = page(read_runs([a_run(count=40)]))
    assert "(at 8 of 20 evaluations)" in text
    assert "sat on a <mark>mat</mark> all day" in text
    assert '<td class="number">20</td><td class="right">mat 5%</td><td>rug 5%</td>' in text
    assert '<td class="number">400</td><td class="right">mat 100%</td>' in text


def test_facts_and_warnings_stand_on_the_page():
    text = page(read_runs([a_run()]))
    for fact in ("BertForMaskedLM", "1.45M", "texts.txt", "120k", "1 h 0 min", "3.0000 at 120", "8.00", "6.0000"):
        assert f">{fact}</td>" in text
    assert "12% of the rows are duplicates" in text
    assert "<title>mlm/1 – training report</title>" in text
    assert text.count('role="img" aria-label="') == text.count("<svg")


def test_a_run_of_few_columns_is_drawn_as_far_as_it_goes():
    metrics({"step": 1, "val/loss": 2.0})
    (run,) = runs = read_runs(["runs/mlm/1"])
    assert axes_of(runs) == ["steps"]
    text = page(runs)
    assert points(text, "curve-loss-steps-val-0") == 1
    assert "without progress/tokens it is not drawn against tokens" in text
    assert any("config.yaml is missing" in note for note in run.notes)


def test_a_long_curve_is_thinned_to_means_with_a_running_mean_over_it():
    metrics(*({"step": n, "train/loss": 5 + n % 2} for n in range(1, 30_001)))
    text = page(read_runs(["runs/mlm/1"]))
    assert len(text) < 300_000
    assert points(text, "curve-loss-steps-train-0-mean") > 1


def test_the_same_runs_give_the_same_page():
    metrics({"step": 1, "train/loss": 3}, {"step": 2, "train/loss": 2})
    runs = read_runs(["runs/mlm/1"])
    assert page(runs) == page(runs)


# ------------------------------------------------------------------ the command


def test_the_command_writes_the_page_and_a_png_of_each_curve(capsys):
    rows = [{"step": n, "progress/tokens": 9 * n, "progress/seconds": n, "val/mlm": 9 - n} for n in range(1, 9)]
    metrics(*rows, folder="runs/$x^2$/1")
    metrics(*rows[:4], folder="_y")
    assert main(["report", "runs/$x^2$", "_y", "--out", "new/page.html", "--png", "new/png"]) == 0
    assert "report written: new/page.html, and 3 PNGs in new/png" in capsys.readouterr().out
    assert "$x^2$/1" in Path("new/page.html").read_text()
    for axis in ("steps", "tokens", "time"):
        image = imread(f"new/png/mlm.{axis}.png")
        assert image.shape[1] == 768
        assert (abs(image[..., :3] - (0, 0x72 / 255, 0xB2 / 255)).max(-1) < 0.02).sum() > 500, axis


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere"], "run nowhere does not exist"),
        (["runs/mlm/1", "runs/mlm"], "is named twice; name each run once"),
        (["runs/mlm/1", "--out", "runs"], "out must name a file"),
    ],
)
def test_what_cannot_be_reported_is_one_sentence_and_exit_code_2(capsys, args, message):
    a_run()
    assert main(["report", *args]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown
    assert not Path("report.html").exists()


def test_a_missing_package_is_named_with_the_install_command(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find(name, *a))
    assert main(["report", a_run()]) == 2
    assert "pip install 'foundry-lightning[report]'" in capsys.readouterr().err


# ------------------------------------------------------------------ in a browser

LOOK = """
<script>
addEventListener("load", () => {
  const curves = () => [...document.querySelectorAll("g[id^=curve-]")].filter(curve => {
    const {width, height} = curve.getBoundingClientRect();
    return width > 50 && height > 10;
  }).map(curve => curve.id);
  const found = {opened: curves()};
  document.querySelector("label[for=axis-time]").click();
  Object.assign(found, {switched: curves(), address: location.hash, title: document.title,
    loaded: performance.getEntriesByType("resource").length,
    tooWide: document.documentElement.scrollWidth - innerWidth});
  const shown = document.createElement("pre");
  shown.id = "found";
  shown.textContent = JSON.stringify(found);
  document.body.append(shown);
});
</script>
"""


def browse(*args: str) -> str:
    """What headless Chromium writes."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    assert browser is not None, f"needs one of {', '.join(names)}: apt-get install chromium"
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--user-data-dir=profile"]
    return subprocess.run([browser, *flags, *args], capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.browser
@pytest.mark.parametrize("width", [1200, 500])  # 500: the least that headless Chromium gives
def test_a_browser_shows_every_curve_and_switches_the_axis(width):
    write_report([a_run(distil=True), a_run("runs/mlm/2", count=6)], out="report.html")
    text = Path("report.html").read_text()
    Path("look.html").write_text(text.replace("</body>", LOOK + "</body>"))
    dom = browse("--dump-dom", f"--window-size={width},2000", f"{Path('look.html').absolute().as_uri()}#tokens")
    found = json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', dom)[1]))
    drawn = set(re.findall(r'"(curve-[^"]*)"', text))
    assert set(found["opened"]) == {curve for curve in drawn if "-tokens-" in curve}  # the address chose the axis
    assert set(found["switched"]) == {curve for curve in drawn if "-time-" in curve}
    assert len(found["switched"]) == 13 + 9
    assert found["address"] == "#time"
    assert found["title"] == "2 runs – training report"  # no text of a run was run
    assert found["loaded"] == 0
    assert found["tooWide"] <= 0


@pytest.mark.browser
def test_a_screenshot_holds_the_colours_of_the_runs():
    write_report([a_run(), a_run("runs/mlm/2", count=6)], out="report.html")
    page_file = Path("report.html").absolute().as_uri()
    browse("--screenshot=shot.png", "--window-size=1200,1200", page_file)
    image = imread("shot.png")[..., :3]
    for colour in ((0, 0x72, 0xB2), (0xD5, 0x5E, 0)):
        assert (abs(image * 255 - colour).max(-1) < 3).sum() > 1000  # without curves some 450
