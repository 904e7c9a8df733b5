"""A word of 0.2 that has gone raises an error that says what to write instead."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

import gradsync as gs
from gradsync.cli import main
from gradsync.environment import check_variables
from gradsync.removed import REMOVED


def words_of(where: str) -> list[tuple[str, str]]:
    assert REMOVED[where]
    return list(REMOVED[where].items())


@pytest.mark.parametrize(("word", "advice"), words_of("AllreduceCallback"))
def test_an_option_of_the_callback(word: str, advice: str) -> None:
    with pytest.raises(gs.InvalidArgument) as caught:
        gs.AllreduceCallback("mean", **{word: None})  # type: ignore[arg-type]
    assert str(caught.value) == f"AllreduceCallback has no {word} any more (removed in 0.3): {advice}"


@pytest.mark.parametrize(("word", "advice"), words_of("init_process_group"))
def test_an_argument_of_init_process_group(word: str, advice: str) -> None:
    with pytest.raises(gs.InvalidArgument) as caught:
        gs.init_process_group("local", **{word: None})  # type: ignore[arg-type]
    assert str(caught.value) == f"init_process_group has no {word} any more (removed in 0.3): {advice}"


@pytest.mark.parametrize(("word", "advice"), words_of("an AllreduceCallback"))
def test_a_method_of_the_callback(word: str, advice: str) -> None:
    sync = gs.AllreduceCallback("mean")
    with pytest.raises(gs.InvalidArgument) as caught:
        getattr(sync, word)
    assert str(caught.value).endswith(f"has no {word} any more (removed in 0.3): {advice}")
    assert not hasattr(sync, word)


@pytest.mark.parametrize(("word", "advice"), words_of("gradsync"))
def test_a_name_of_the_package(word: str, advice: str) -> None:
    with pytest.raises(gs.InvalidArgument) as caught:
        getattr(gs, word)
    assert str(caught.value).endswith(f"has no {word} any more (removed in 0.3): {advice}")
    assert not hasattr(gs, word)


@pytest.mark.parametrize(("option", "advice"), words_of("gradsync run"))
def test_an_option_of_the_launcher(option: str, advice: str) -> None:
    done = CliRunner().invoke(main, ["run", option, "x", "train.py"])
    assert done.exit_code == 2
    assert done.output.endswith(f"gradsync run has no {option} any more (removed in 0.3): {advice}\n")


@pytest.mark.parametrize(("command", "advice"), words_of("gradsync (command)"))
def test_a_command(command: str, advice: str) -> None:
    done = CliRunner().invoke(main, [command, "x"])
    assert done.exit_code == 2
    assert done.output.endswith(f"gradsync has no {command} any more (removed in 0.3): {advice}\n")


@pytest.mark.parametrize(("name", "advice"), words_of("gradsync (variables)"))
def test_a_variable(name: str, advice: str) -> None:
    check_variables({name: ""})  # as good as not set
    with pytest.raises(gs.InvalidArgument) as caught:
        check_variables({name: "1"})
    assert name in str(caught.value)
    assert str(caught.value).endswith(advice)


@pytest.mark.parametrize(
    "statement",
    [
        "from gradsync.hooks import Int8Hook",
        "from gradsync import hooks",
        "import gradsync.adapters.torch",
        "from gradsync.adapters.torch import Synchronised",
    ],
)
def test_an_import(statement: str) -> None:
    with pytest.raises(gs.InvalidArgument, match="any more .removed in 0.3.: ") as caught:
        exec(statement)
    assert isinstance(caught.value, ImportError)  # for tools that import every module


def test_a_name_that_never_was_is_unknown() -> None:
    for owner in (gs, gs.AllreduceCallback("mean")):
        with pytest.raises(AttributeError, match="no attribute 'never'") as caught:
            getattr(owner, "never")  # noqa: B009
        assert not isinstance(caught.value, gs.InvalidArgument)
