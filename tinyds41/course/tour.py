"""The tour: train a tiny DeepSeek-V4.1-Flash on real text, let it write, and account for all it keeps."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tinyds41.checkpoint.replace import check_replaceable
from tinyds41.checkpoint.write import save
from tinyds41.config import Config
from tinyds41.cost.flops import ACCOUNTINGS, decode_cost
from tinyds41.cost.kv_bytes import kv_bytes
from tinyds41.cost.parameters import count_parameters
from tinyds41.course.report import Report
from tinyds41.infer.generate import stream
from tinyds41.memory import require_device
from tinyds41.model.transformer import Model
from tinyds41.show.cost_plots import kv_rows, plot_decode_work, plot_kv_bytes, plot_parameters
from tinyds41.show.observations import LOAD_NAMES, SELECTION_NAMES, expert_loads, selection_spans
from tinyds41.show.plan_plot import plot_layer_plan
from tinyds41.show.readme_figures import CONTEXTS
from tinyds41.show.run_plots import LossPoint, plot_expert_load, plot_loss, plot_selection
from tinyds41.tokenizer import Tokenizer
from tinyds41.trace import Trace
from tinyds41.train.corpus import Corpus, data_folder, documents
from tinyds41.train.evaluate import Evaluation, evaluate
from tinyds41.train.history import History
from tinyds41.train.trainer import train

TEXT = "plays"
LENGTH, BATCH_SIZE = 256, 8
LONG = 512  # the context whose last query is shown: twice what the model was trained on


@dataclass(frozen=True, kw_only=True)
class TourOptions:
    """text: a name of the shipped data or a UTF-8 file. steps: of training, 8 x 256 tokens each."""

    steps: int = 200
    text: str = TEXT
    device: str = "cpu"
    seed: int = 0
    out: Path = Path("runs/tour")


def tour(options: TourOptions, say: Callable[[str], None] = print) -> Path:
    """Runs the whole tour and returns the path of report.html.

    Raises: OSError when the folder cannot be written; ValueError for a device that is not there, and for a text that
        is too short or not UTF-8. All before any training.
    """
    for folder in (options.out, options.out / "figures"):
        require_writable(folder)
    check_replaceable(options.out / "model")
    require_device(options.device)
    started = time.perf_counter()
    tokenizer = Tokenizer.load(data_folder())
    training = Corpus.from_texts(tokenizer, documents(options.text, "train"))
    held_out = Corpus.from_texts(tokenizer, documents(options.text, "held_out"))
    for corpus in (training, held_out):
        corpus.require(LENGTH)  # the held-out part is evaluated only after minutes of training
    config = Config.preset("toy", engram_compressed_vocab_size=tokenizer.compressed_vocab_size)
    model = Model(config, tokenizer=tokenizer, device=options.device, seed=options.seed)
    say(f"Training {sum(p.numel() for p in model.parameters()):,} parameters on {len(training):,} tokens of "
        f"{Path(options.text).name}, {options.steps} steps of {BATCH_SIZE} x {LENGTH} tokens.")  # fmt: skip
    history = train(model, training, steps=options.steps, seed=options.seed, batch_size=BATCH_SIZE, length=LENGTH,
                    folder=options.out)  # fmt: skip
    report = Report(f"A tour of tinyds41: a toy trained for {history.step} steps", options.out)
    if history.interrupted:
        say(f"Interrupted after {history.step} steps: the report shows what was learned so far.")
    quality = evaluate(model, held_out, train=training, length=LENGTH, batch_size=BATCH_SIZE, max_tokens=20_000)
    show_training(report, model, history, quality)
    say(quality_line(quality))
    show_text(report, model, options.seed, say)
    show_plan(report, config, say)
    show_bytes(report, config, say)
    show_query(report, model, held_out, say)
    show_parameters(report, config)
    show_decode_work(report, say)
    report.say(f"The tour took {time.perf_counter() - started:.0f} s on {options.device} with "
               f"{torch.get_num_threads()} threads.")  # fmt: skip
    paths = report.write()
    save(model, options.out / "model")
    say(f"Report: {paths[1]}   model: {options.out / 'model'}")
    return paths[1]


def require_writable(folder: Path) -> None:
    """Raises: OSError naming the folder that cannot be made or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"the output folder {folder} cannot be written: {error.strerror or error}") from error


def quality_line(quality: Evaluation) -> str:
    assert quality.unigram_loss is not None
    gain = quality.unigram_loss - quality.loss
    return (
        f"Held-out loss {quality.loss:.2f} nats per token ({quality.bits_per_character or 0:.2f} bits per character); "
        f"counting tokens alone reaches {quality.unigram_loss:.2f}, so the toy is {abs(gain):.2f} nats "
        f"{'better' if gain >= 0 else 'worse'}."
    )


def show_training(report: Report, model: Model, history: History, quality: Evaluation) -> None:
    report.section("What it learned")
    report.say(quality_line(quality))
    points = [LossPoint(step, "train", loss) for step, loss in enumerate(history.losses, 1)]
    points.append(LossPoint(history.step, "held out", quality.loss))
    assert quality.unigram_loss is not None
    points.append(LossPoint(history.step, "unigram", quality.unigram_loss))
    report.figure("loss", plot_loss(points, model="the toy", vocab_size=model.config.vocab_size), points)
    report.say("How much of the attention mass the indexers keep, before training and now. In so short a training "
               "attention over far entries stays nearly flat, so there is little for them to learn.")  # fmt: skip
    before, now = history.records[0]["recall"], history.records[-1]["recall"]
    report.table("index source      in its selection: before     now   in the pool: before     now\n" + "\n".join(
        f"layer {source:<12}{_percent(before[source]['selection']):>25}{_percent(found['selection']):>8}"
        f"{_percent(before[source]['pool']):>22}{_percent(found['pool']):>8}"
        for source, found in now.items()))  # fmt: skip


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def show_text(report: Report, model: Model, seed: int, say: Callable[[str], None]) -> None:
    report.section("A paragraph by the toy")
    prompt = "HAMLET\n"
    text = "".join(stream(model, prompt, max_new_tokens=120, temperature=0.8, top_k=40, seed=seed))
    report.table(prompt + text)
    say(f"\n{prompt}{text}\n")


def show_plan(report: Report, config: Config, say: Callable[[str], None]) -> None:
    report.section("What every layer is")
    report.table(str(config.plan()))
    ax = plot_layer_plan(config.plan(), model="the toy")
    report.figure("layer_plan", ax, config.plan())
    say(f"{config.plan()}\n")


def show_bytes(report: Report, config: Config, say: Callable[[str], None]) -> None:
    report.section("What it must remember")
    models = {"toy": kv_bytes(config), "flash": kv_bytes(Config.preset("flash"))}
    report.say("Rows are encoded and their bytes counted: packed FP4 for what grows with the context, FP8 for windows.")
    report.table("\n\n".join(f"{name}\n{cache}" for name, cache in models.items()))
    report.figure("kv_bytes", plot_kv_bytes(models), kv_rows(models))
    for name, cache in models.items():
        say(f"{name}: {float(cache.bytes_per_token):,.10g} bytes per token of context, "
            f"{cache.window_bytes:,} bytes of windows per sequence")  # fmt: skip


def show_query(report: Report, model: Model, held_out: Corpus, say: Callable[[str], None]) -> None:
    """What each layer read for the last token, what the pool held, how busy the experts were."""
    length = min(LONG, len(held_out))
    trace = Trace(*SELECTION_NAMES, *LOAD_NAMES)
    with torch.no_grad():
        model(held_out.ids[:length].long()[None].to(model.device), trace=trace)
    config, query = model.config, length - 1
    spans = selection_spans(trace, config, query)
    report.section(f"What each layer read for one query, at position {query}")
    pool = trace[f"layers.{config.candidate_source_layer_id}.indexer.pool"][0, query]
    kept = int((pool >= 0).sum()) * config.candidate_block_size
    line = (f"The candidate pool held {kept} of {length} entries; every selection holds at most {config.index_topk}. "
            f"Each layer sees its last {config.sliding_window} tokens besides.")  # fmt: skip
    report.say(line)
    say(line)
    report.figure("selection", plot_selection(spans, model="the toy"), spans)
    loads = expert_loads(trace, config)
    report.section("Which experts work")
    report.figure("expert_load", plot_expert_load(loads, model="the toy"), loads)


def show_parameters(report: Report, config: Config) -> None:
    report.section("Where the parameters sit")
    models = {"toy": count_parameters(config), "flash": count_parameters(Config.preset("flash"))}
    for name, parameters in models.items():
        report.table(f"{name}\n{parameters}")
        report.figure(f"parameters_{name}", plot_parameters(parameters, model=name), parameters.components)


def show_decode_work(report: Report, say: Callable[[str], None]) -> None:
    report.section("What one more token costs")
    cost = decode_cost(Config.preset("flash"), "flash")
    curves = {name: cost.curve(CONTEXTS, name) for name in ACCOUNTINGS}
    growth = {name: cost.growth(CONTEXTS[0], CONTEXTS[-1], name) for name in ACCOUNTINGS}
    line = "flash, one decoded token: " + ", ".join(
        f"{name} work grows {factor:.2f} times" for name, factor in growth.items()
    ) + f" while the context grows {CONTEXTS[-1] // CONTEXTS[0]} times"  # fmt: skip
    report.say(line + ".")
    say(line)
    ax = plot_decode_work(curves, model="flash")
    report.figure("decode_work", ax, [row for rows in curves.values() for row in rows])
