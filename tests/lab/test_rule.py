"""The rule by which claims are judged: verdicts, laws, horizons, distances."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.claims import HARM, claim, figure

from sdpa_lab import claims
from sdpa_lab.claims import Expect
from sdpa_lab.claims.record import HORIZONS, Trained, at_horizons
from sdpa_lab.claims.rule import clearance, decide, decide_horizons, distance
from sdpa_lab.tools.estimate import Estimate, exact


@pytest.mark.parametrize(
    ("low", "high", "law", "verdict"),
    [
        (0.95, 1.05, None, ("reproduced", True)),
        (0.85, 0.95, None, ("undecided", False)),
        (0.5, 1.5, None, ("undecided", False)),
        (0.4, 0.6, None, ("refuted", True)),
        (0.4, 0.6, 0.5, ("corrected", True)),
        (0.3, 0.7, 0.5, ("undecided", False)),
        (0.3, 0.85, 0.5, ("undecided", False)),
        (0.2, 0.3, 0.5, ("refuted", True)),
        # A law does not help where the claim holds or may hold.
        (0.95, 1.05, 0.5, ("reproduced", True)),
        (0.85, 0.95, 0.85, ("undecided", False)),
    ],
)
def test_one_figure(low, high, law, verdict):
    assert decide([Expect("x", 1.0, 0.1, law)], {"x": figure(low, high)}) == verdict


def test_every_figure_must_agree():
    expect = [Expect("a", 1.0, 0.1), Expect("b", 1.0, 0.1, law=2.0)]
    inside, across, twice = figure(0.95, 1.05), figure(0.85, 0.95), figure(1.95, 2.05)
    assert decide(expect, {"a": inside, "b": inside})[0] == "reproduced"
    assert decide(expect, {"a": inside, "b": across})[0] == "undecided"
    assert decide(expect, {"a": inside, "b": twice})[0] == "corrected"
    # The first may still turn out as neither claimed nor ours, which would refute.
    assert decide(expect, {"a": across, "b": twice}) == ("undecided", False)
    assert decide(expect, {"a": across, "b": figure(4.0, 5.0)}) == ("refuted", False)
    assert decide(expect, {"a": inside, "b": twice}) == ("corrected", True)
    at_law = figure(1.85, 2.05)
    near = [Expect("a", 1.0, 0.9, law=2.0, law_margin=0.2), Expect("b", 1.0, 0.1, law=2.0)]
    assert decide(near, {"a": at_law, "b": twice}) == ("corrected", True)
    assert decide(expect, {"a": twice, "b": twice})[0] == "refuted"


def test_a_law_of_its_own_figure_and_margin():
    expect = [Expect("x", 1.0, (0, None), law=0.0, law_margin=0.1, law_figure="y")]
    assert decide(expect, {"x": figure(0, 0.1), "y": figure(-0.05, 0.05)})[0] == "corrected"
    assert decide(expect, {"x": figure(0, 0.1), "y": figure(0.9, 1.1)})[0] == "refuted"


ENDS = st.floats(0, 4)
ONE_FIGURE = st.tuples(
    st.builds(
        Expect,
        st.just("x"),
        st.floats(-1, 3),
        ENDS | st.tuples(st.none(), ENDS) | st.tuples(ENDS, st.none()),
        st.none() | st.floats(-1, 3),
        ENDS,
        law_figure=st.none(),
        horizon=st.sampled_from([None, 1, 2]),
    ),
    st.floats(-5, 5),
    ENDS,
    ENDS,
)


@given(st.lists(ONE_FIGURE, min_size=1, max_size=4))
def test_intervals_that_hold_the_truth_never_give_another_verdict_than_it(figures):
    """However long they are: more draws change "undecided" alone."""
    expect, truth, found = [], {}, {}
    for i, (part, value, below, above) in enumerate(figures):
        expect.append(part._replace(figure=str(i)))
        truth[str(i)] = exact(value)
        found[str(i)] = Estimate(value, value - below, value + above, 9)
    for judged in (decide, decide_horizons):
        verdict, final, *_ = judged(expect, truth)
        assert verdict != "undecided"
        assert final
        assert judged(expect, found)[0] in ("undecided", verdict)


# Each verdict of rows with random figures, of which these take the least time.
SWEPT = {
    "sigma-law": "corrected",
    "noncommute": "corrected",
    "cosine-analogy": "corrected",
    "weight-grad": "corrected",
    "overflow-64": "corrected",
    "init-var": "reproduced",
    "swap": "reproduced",
}


@pytest.mark.parametrize("name", SWEPT)
def test_fewer_draws_leave_a_row_undecided_and_never_change_its_verdict(name):
    found = {
        (times, seed): claims.ledger([name], seed=seed, times=times)[0].verdict
        for times in (0.001, 0.01, 0.03, 0.1)
        for seed in range(30, 34)
    }
    others = {key: verdict for key, verdict in found.items() if verdict != "undecided"}
    assert set(others.values()) <= {SWEPT[name]}, others
    assert name != "sigma-law" or "undecided" in found.values()


@pytest.mark.parametrize(
    ("low", "high", "expect", "clear"),
    [
        # Inside: from the nearer end; open to one side there is one end alone.
        (0.9, 1.0, Expect("x", 1.0, 0.2), 1.0),
        (1.0, 1.1, Expect("x", 1.0, (None, 0.2)), 1.0),
        # Outside: from the claim, and where there is a law from its ends as well.
        (0.4, 0.5, Expect("x", 1.0, 0.2), 3.0),
        (0.4, 0.5, Expect("x", 1.0, 0.2, law=0.4), 1.0),
        (0.5, 0.6, Expect("x", 1.0, 0.2, law=0.1, law_margin=0.35), 0.5),
        # Across an end.
        (0.7, 0.9, Expect("x", 1.0, 0.2), 0.0),
        (0.5, 0.6, Expect("x", 1.0, 0.2, law=0.5, law_margin=0.05), 0.0),
        # Without an interval no draw could change anything.
        (1.0, 1.0, Expect("x", 1.0, 0.2), math.inf),
    ],
)
def test_how_far_an_interval_lies_from_the_ends_of_margins(low, high, expect, clear):
    assert clearance(expect, {"x": figure(low, high)}) == pytest.approx(clear)


def test_the_law_of_another_figure_is_as_far_as_that_figure():
    expect = Expect("x", 1.0, 0.5, law=0.0, law_margin=0.3, law_figure="y")
    assert clearance(expect, {"x": figure(2.5, 3.0), "y": figure(0.0, 0.1)}) == pytest.approx(2)


def test_a_verdict_is_as_far_from_another_as_the_figure_that_it_hangs_on():
    expect = [Expect("a", 1.0, 0.5), Expect("b", 1.0, 0.5)]
    near, far, out = figure(0.6, 0.8), figure(0.9, 1.1), figure(9.0, 10.0)
    assert distance(expect, {"a": near, "b": far}) == (pytest.approx(0.5), "a")
    # One figure is enough to refute, and the clearest one is that which does.
    assert distance(expect, {"a": out, "b": far}) == (pytest.approx(7.5), "a")
    assert distance(expect, {"a": figure(0.4, 0.6), "b": out}) == (pytest.approx(7.5), "b")
    assert distance(expect, {"a": figure(0.4, 0.6), "b": far}) == (0.0, "a")


@pytest.mark.parametrize(
    ("centres", "clear", "name"),
    [
        # One verdict at all of them: the nearest counts.
        ((1.0, 1.02, 1.04), 0.1, "x, 30 steps"),
        ((2.0, 2.01, 2.02), 0.3, "x, 30 steps"),
        # It depends on them, and hangs on two that differ: the clearest of each verdict, ...
        ((1.0, 1.04, 2.5), 0.5, "x, 10 steps"),
        ((2.0, 2.03, 3.0), 0.5, "x, 10 steps"),
        # ... whatever others leave undecided, ...
        ((1.0, 1.1, 2.0), 0.5, "x, 10 steps"),
        # ... or on one that holds and one that falls, where the law there is undecided.
        ((1.0, 1.02, 2.1), 0.5, "x, 10 steps"),
        ((1.0, 1.0, 1.18), 0.3, "x, 30 steps"),
        # Undecided.
        ((2.0, 2.0, 2.1), 0.0, "x, 30 steps"),
    ],
)
def test_of_several_horizons_those_count_on_which_the_verdict_hangs(centres, clear, name):
    found = {e.figure: figure(c - 0.05, c + 0.05) for e, c in zip(HARM, centres, strict=True)}
    assert distance(HARM, found) == (pytest.approx(clear), name)


def test_one_sided_margins():
    at_least = Expect("x", 10.0, (0, None))
    assert decide([at_least], {"x": figure(10.0, 1e9)})[0] == "reproduced"
    assert decide([at_least], {"x": figure(9.0, 11.0)})[0] == "undecided"
    assert decide([at_least], {"x": figure(1.0, 9.9)})[0] == "refuted"
    assert decide([Expect("x", 10.0, (None, 1))], {"x": figure(-1e9, 11.0)})[0] == "reproduced"


@pytest.mark.parametrize(
    ("margin", "law", "law_margin", "allowed"),
    [
        (0.1, 2.0, None, True),
        (0.1, 1.3, 0.1, True),
        # Wider in itself, but not in relation to its value; then in both.
        (0.1, 20.0, 2.0, True),
        (0.1, 20.0, 2.1, False),
        (0.1, 2.0, (0, 100), False),
        # Touching, overlapping, the same.
        (0.2, 0.6, 0.2, False),
        (0.2, 0.7, 0.2, False),
        (0.2, 1.0, None, False),
        # Beside a claim that is open to one side: no wider than the gap.
        ((0, None), 0.0, 0.5, True),
        ((0, None), 0.0, (0, 0.5), True),
        ((0, None), 0.0, 0.6, False),
        ((0, None), 0.0, (5.0, 0.5), False),
        ((0, None), 0.5, (0.5, 0.5), False),
        ((None, 0.5), 2.0, 0.25, True),
        ((None, 0.5), 2.0, (0, 100), False),
    ],
)
def test_a_law_is_no_wider_than_its_claim_and_leaves_a_gap(margin, law, law_margin, allowed):
    expect = Expect("x", 1.0, margin, law, law_margin)
    if allowed:
        assert claim([expect], None).expect == (expect,)
        return
    with pytest.raises(ValueError, match=r"^law: expected values apart .* for x of test; narrow"):
        claim([expect], None)


def test_a_law_of_another_figure_may_lie_where_the_claim_does():
    claim([Expect("x", 0.0, 0.1, law=0.0, law_figure="y")], None)
    with pytest.raises(ValueError, match=r"^law: "):
        claim([Expect("x", 0.0, 0.1, law=0.0, law_margin=0.2, law_figure="y")], None)


def test_the_law_of_a_pretrained_model_obeys_the_same_rule():
    part = Trained("model", (Expect("y", 1.0, 0.1, law=1.05),), "y")
    with pytest.raises(ValueError, match=r"^law: .* for y of test;"):
        claim([Expect("x", 1.0, 0.1)], None, trained=(part,))


def test_figures_are_named_by_their_horizons():
    first, second, *rest = at_horizons(
        Expect("a", 1.0, 0.1), Expect("b", 1.0, 0.1, law=0.0, law_figure="c")
    )
    assert len(rest) == 2 * len(HORIZONS) - 2
    assert (first.figure, first.horizon) == ("a, 150 steps", 150)
    assert (second.figure, second.law_figure) == ("b, 150 steps", "c, 150 steps")
    assert rest[-1].figure == "b, 1200 steps"


@pytest.mark.parametrize(
    ("centres", "verdict", "final"),
    [
        ((1, 1, 1), "reproduced", True),
        ((2, 2, 2), "corrected", True),
        ((3, 3, 3), "refuted", True),
        ((2, 1, 1), "depends on the horizon", True),
        ((2, 2, 3), "depends on the horizon", True),
        # At 1.1 the interval lies across: whatever is found there, two others differ already.
        ((2, 1.1, 1), "depends on the horizon", False),
        # At 2.1 it lies across the law's end, and outside the claim in any case.
        ((1, 1, 2.1), "depends on the horizon", False),
        ((1, 1, 1.1), "undecided", False),
        ((2, 2, 2.1), "undecided", False),
    ],
)
def test_a_claim_has_one_verdict_at_all_horizons_or_depends_on_them(centres, verdict, final):
    found = {e.figure: figure(c - 0.05, c + 0.05) for e, c in zip(HARM, centres, strict=True)}
    result = decide_horizons(HARM, found)
    assert result[:2] == (verdict, final)
    one = {1: "reproduced", 1.1: "undecided", 2.1: "undecided", 2: "corrected", 3: "refuted"}
    assert result[2] == {10 * (i + 1): one[c] for i, c in enumerate(centres)}


def test_figures_without_a_horizon_count_at_every_one():
    expect = (Expect("start", 0.0, 0.5), *HARM)
    found = {e.figure: figure(0.95, 1.05) for e in expect}
    assert decide_horizons(expect, found)[0] == "refuted"
    assert decide_horizons(expect[:1], found) == ("refuted", True, {})
