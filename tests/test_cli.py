"""The command line routes, loads no more than it needs, and turns bad input into one line."""

import subprocess
import sys
from types import ModuleType

import pytest

import tinyds41
from tinyds41 import cli
from tinyds41.cli import COMMANDS, Command, main


@pytest.fixture
def failing(monkeypatch):
    """A command `fail` that raises the exception it is given."""

    def install(error: BaseException) -> None:
        module = ModuleType("failing_command")
        module.add_parser = lambda subparsers: subparsers.add_parser("fail")  # type: ignore[attr-defined]

        def run(args):
            raise error

        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "failing_command", module)
        monkeypatch.setitem(cli.COMMANDS, "fail", Command("failing_command", "fails"))

    return install


@pytest.mark.parametrize("argv", [["--help"], ["plan", "--preset", "flash"]])
def test_a_command_that_needs_no_torch_does_not_import_it(argv):
    code = ("import sys; from tinyds41.cli import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
            "sys.exit(str({'torch', 'numpy', 'matplotlib'} & set(sys.modules) or ''))")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "tinyds41", "plan", "--preset", "nano"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout == f"{tinyds41.Config.preset('nano').plan()}\n"


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert name in shown
        assert command.summary in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert f"usage: tinyds41 {name}" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["tuor"], ["plan"], ["plan", "--preset", "nano", "--config", "x"]])
def test_a_call_that_argparse_refuses_exits_with_2(argv, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert "tinyds41" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ValueError("width 3\nis odd"), OSError("width 3 is odd"),
                                   MemoryError("width 3 is odd")])  # fmt: skip
def test_bad_input_takes_one_line_and_no_traceback(failing, capsys, error):
    failing(error)
    assert main(["fail"]) == 2
    assert capsys.readouterr().err == "tinyds41: error: width 3 is odd\n"


@pytest.mark.parametrize("argv", [["--debug", "fail"], ["fail", "--debug"]])
def test_debug_shows_the_traceback_on_either_side_of_the_command(failing, argv):
    failing(ValueError("width 3 is odd"))
    with pytest.raises(ValueError, match="width 3 is odd"):
        main(argv)


def test_a_mistake_of_ours_is_not_dressed_up_as_bad_input(failing):
    failing(TypeError("None + 1"))
    with pytest.raises(TypeError):
        main(["fail"])


def test_an_interrupt_ends_quietly(failing, capsys):
    failing(KeyboardInterrupt())
    assert main(["fail"]) == 130
    assert capsys.readouterr().err == "tinyds41: interrupted\n"


def test_a_reader_who_closes_the_pipe_is_no_error():
    """`tinyds41 plan ... | true`: the table is written into a pipe that nobody reads."""
    code = ("import os, sys; from tinyds41.cli import main\nreader, writer = os.pipe()\nos.dup2(writer, 1)\n"
            "os.close(reader); os.close(writer)\nsys.exit(main(['plan', '--preset', 'flash']))")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_unknown_preset_names_the_known_ones(capsys):
    assert main(["plan", "--preset", "flahs"]) == 2
    assert capsys.readouterr().err == (
        "tinyds41: error: unknown preset 'flahs': the presets are nano, toy, small, flash\n")


def test_plan_reads_a_config_file(tmp_path, capsys):
    path = tmp_path / "config.json"
    config = tinyds41.Config.preset("nano", engram_layer_ids=(), candidate_source_layer_id=None)  # like no preset
    config.to_json(path)
    assert main(["plan", "--config", str(path)]) == 0
    assert capsys.readouterr().out == f"{config.plan()}\n"


def test_a_config_file_that_is_missing_or_no_json_is_named(tmp_path, capsys):
    assert main(["plan", "--config", str(tmp_path / "gone.json")]) == 2
    assert "gone.json" in capsys.readouterr().err
    (tmp_path / "broken.json").write_bytes(b"{\xff")
    assert main(["plan", "--config", str(tmp_path / "broken.json")]) == 2
    shown = capsys.readouterr().err
    assert "broken.json is not a JSON file" in shown
    assert shown.count("\n") == 1


def test_the_public_names_are_listed_and_resolve_at_first_use(monkeypatch):
    for name in tinyds41.__all__:
        monkeypatch.delitem(vars(tinyds41), name, raising=False)  # as if nobody had used it yet
        assert name in dir(tinyds41)
        assert getattr(tinyds41, name).__name__.split(".")[-1] == name
    assert set(tinyds41.__all__) == {*tinyds41._HOMES, "train"}


def test_train_is_the_function_whatever_was_imported_before():
    import tinyds41.train.corpus

    with pytest.raises(TypeError, match="missing 2 required positional arguments: 'model' and 'corpus'"):
        tinyds41.train()
    assert tinyds41.train.corpus.Corpus is not None


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Modle'"):
        _ = tinyds41.Modle
