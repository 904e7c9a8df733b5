"""JAX over gradsync: inside jax.jit and outside. Only the ranks import JAX, which must not be forked."""

from __future__ import annotations

from importlib.util import find_spec

import cross_check_launch as launch
import jax_checks
import pytest
from reported_checks import outcomes_in

pytestmark = pytest.mark.skipif(find_spec("jax") is None, reason="no JAX: pip install jax")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What became of each check on two ranks: "" or its traceback."""
    folder = tmp_path_factory.mktemp("checks")
    launch.run_on_gradsync(2, folder, jax_checks.__file__, str(folder))
    return outcomes_in(folder, 2)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", jax_checks.NAMES)
def test_over_jax(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[name] == ""
