"""What ranks compare before they move anything, and the text where it differs."""

from __future__ import annotations

import numpy as np
import pytest

from gradsync.communicators.agreement import ROWS, Agreement, Description, agreement_on, digest_of, mismatch

_FIELDS = [("weight", "<f4"), ("count", "<i8")]
_PLAIN = np.dtype(_FIELDS)


def headlines(*texts: str) -> dict[int, Description]:
    return {rank: Description(text, 0, ()) for rank, text in enumerate(texts)}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (_PLAIN, np.dtype((np.record, _FIELDS))),
        (np.dtype([("pair", _FIELDS, (2,))]), np.dtype([("pair", (np.record, _FIELDS), (2,))])),
        (
            np.dtype([("flag", "i1"), ("count", "<i4")], align=True),
            np.dtype({"names": ["flag", "count"], "formats": ["i1", "<i4"], "offsets": [0, 4], "itemsize": 8}),
        ),
        (np.dtype("l"), np.dtype("q")),
        (np.dtype(np.float32), np.dtype(np.float32, metadata={"unit": "m"})),
    ],
)
def test_equal_dtypes_agree_whichever_came_first(one: np.dtype, other: np.dtype) -> None:
    assert one == other
    digests = set()
    for first, second in ((one, other), (other, one)):
        agreement_on.cache_clear()  # as in another process
        digests |= {agreement_on("all_gather", (2,), dtype, "").digest for dtype in (first, second)}
    assert len(digests) == 1


@pytest.mark.parametrize("other", ["<i8", ">f4", [("weight", "<f4")], [("weight", "<f4"), ("number", "<i8")]])
def test_other_dtypes_do_not(other: object) -> None:
    agreements = [agreement_on("all_gather", (2,), dtype, "") for dtype in (_PLAIN, np.dtype(np.float32))]
    assert agreement_on("all_gather", (2,), np.dtype(other), "").digest not in [a.digest for a in agreements]


def test_rows_that_may_differ_are_told_as_such() -> None:
    agreement = agreement_on("all_gather", (ROWS, 2), np.dtype(np.float64), "rows [2, 3]")
    assert agreement.describe() == "all_gather of float64[rows, 2] (rows [2, 3])"
    assert agreement.headline() == "all_gather(rows [2, 3]) float64[rows, 2]"
    known = agreement_on("all_reduce", (256, 1000), np.dtype(np.float32), "sum")
    assert known.headline() == "all_reduce(sum) float32[256, 1000] 1.02 MB"


def test_the_first_difference_is_named_as_the_agreement_says() -> None:
    descriptions = {rank: Description("broadcast of 3 arrays", 1, (f"float32[{rank}]",)) for rank in (0, 1)}
    agreement = Agreement(digest_of("broadcast"), str, item="array {} of the list")
    assert "first difference, array 1 of the list:" in str(mismatch("rank 0/2", agreement, descriptions))
    of_gradients = agreement._replace(item=Agreement(0, str).item)
    assert "first difference, gradient 1 of the bucket:" in str(mismatch("rank 0/2", of_gradients, descriptions))


@pytest.mark.parametrize(
    ("lines", "advice"),
    [
        ((("a", "b"), ("b", "a")), "their order is not"),
        ((("a", "b"), ()), "fewer gradients"),
        ((("a", "b"), ("a", "c")), ""),
        (((), ()), ""),
    ],
)
def test_what_to_do_where_the_gradients_of_a_step_differ(lines: tuple[tuple[str, ...], ...], advice: str) -> None:
    descriptions = {
        rank: Description("all_reduce of a bucket", 0, names, kind="bucket") for rank, names in enumerate(lines)
    }
    of_a_step = agreement_on("barrier", (), None, "")._replace(event=2)
    text = str(mismatch("rank 0/2", of_a_step, descriptions))
    assert ", number 3 of this step" in text
    assert advice in text
    assert ("their order is not" in text, "fewer gradients" in text) == (advice[:5] == "their", advice[:5] == "fewer")
    elsewhere = {**descriptions, 1: Description("all_reduce of float64[3] (sum)", 0, lines[1])}
    texts = {
        str(mismatch("rank 0/2", agreement, elsewhere)) for agreement in (of_a_step, of_a_step._replace(event=None))
    }
    assert len({text.partition("\n")[2] for text in texts}) == 1  # whichever rank this one is
    assert not any("their order is not" in text or "fewer gradients" in text for text in texts)


@pytest.mark.parametrize(
    ("texts", "is_advised"),
    [
        (("all_gather of float64[3, 2]", "all_gather of float64[4, 2]"), True),
        (("all_gather of float64[]", "all_gather of float64[4]"), True),
        (("gather of float64[3] (root 1)", "gather of float64[4] (root 1)"), True),
        (("gather of float64[3] (root 1)", "gather of float64[4] (root 2)"), False),
        (("all_gather of float64[3, 2]", "all_gather of float64[3, 4]"), False),
        (("all_gather of float64[3]", "all_gather of float32[4]"), False),
        (("all_reduce of float64[3] (sum)", "all_reduce of float64[4] (sum)"), False),
    ],
)
def test_what_to_do_where_only_the_rows_of_a_gather_differ(texts: tuple[str, str], is_advised: bool) -> None:
    text = str(mismatch("rank 0/2", agreement_on("barrier", (), None, ""), headlines(*texts)))
    assert ('pass sizes="ask"' in text) == is_advised
