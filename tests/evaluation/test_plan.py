"""Which lengths fit, which tokens are scored, where target blocks lie."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfield.evaluation.plan import LadderSettings, make_plan, position_buckets


def reasons(plan):
    return {(left.length, left.protocol): left.reason for left in plan.left_out}


def test_every_length_scores_one_region():
    plan = make_plan(LadderSettings(), 16 * 128 * 2 + 77, 16, None)
    assert plan.lengths == (16, 32, 64, 128, 256, 512, 1024, 2048)
    assert plan.tokens == 2 * 2048
    assert plan.left_out == ()
    assert all(plan.tokens % length == 0 for length in plan.lengths)


def test_budget_is_rounded_down_to_the_longest_length():
    plan = make_plan(LadderSettings(multiples=(1, 4), tokens=200), 10_000, 16, None)
    assert plan.tokens == 192


def test_left_out_lengths_say_why():
    short = make_plan(LadderSettings(), 16 * 4 + 1, 16, None)
    assert short.lengths == (16, 32, 64)
    assert reasons(short)[128, "windows"] == (
        "text too short: 129 tokens needed, the stream has 65"
    )
    assert {p for length, p in reasons(short) if length == 2048} == {"windows", "fixed", "clipped"}
    one_less = make_plan(LadderSettings(), 16 * 4, 16, None)  # the last target has no room
    assert one_less.lengths == (16, 32)
    absolute = make_plan(LadderSettings(), 10_000, 16, 40)
    assert absolute.lengths == (16, 32)
    assert "40 learned absolute positions" in reasons(absolute)[64, "fixed"]
    budget = make_plan(LadderSettings(tokens=100), 10_000, 16, None)
    assert "longer than the 100 tokens to score" in reasons(budget)[128, "windows"]
    odd = make_plan(LadderSettings(lengths=(16, 48, 64)), 150, 16, None)
    assert odd.lengths == (16, 48)
    assert "tile a multiple of 192 tokens, more than the 149" in reasons(odd)[64, "windows"]


def test_protocols_that_need_more_than_a_length_fit_say_so():
    plan = make_plan(LadderSettings(lengths=(4, 8, 24, 48)), 1000, 16, None)
    assert reasons(plan)[4, "fixed"].startswith("no longer than a target block")
    assert reasons(plan)[24, "clipped"] == "not a multiple of the training length 16"
    assert (48, "clipped") not in reasons(plan)
    odd = make_plan(LadderSettings(multiples=(1, 2)), 1000, 10, None)
    assert "4 does not divide 10" in reasons(odd)[20, "clipped"]
    no_base = make_plan(LadderSettings(lengths=(8, 16)), 100, 512, None)
    assert no_base.base is None
    assert "windows of 512 tokens, which are left out" in reasons(no_base)[8, "clipped"]
    assert reasons(no_base)[512, "windows"].startswith("text too short")


def test_nothing_to_evaluate_is_an_error():
    with pytest.raises(ValueError, match="no length can be evaluated; 16: text too short: 17"):
        make_plan(LadderSettings(), 16, 16, None)
    with pytest.raises(ValueError, match="train_length = 0"):
        make_plan(LadderSettings(), 16, 0, None)


@given(
    quarter=st.integers(1, 5),
    longest=st.sampled_from([1, 2, 4, 8]),
    more=st.integers(1, 700),
    blocks=st.integers(1, 40),
)
def test_target_blocks_fit_never_overlap_and_are_spread(quarter, longest, more, blocks):
    base = 4 * quarter
    settings = LadderSettings(multiples=tuple({1, longest}), blocks=blocks)
    plan = make_plan(settings, base * longest + more, base, None)
    ends, last = plan.block_ends, plan.block_ends[-1]
    assert 1 <= len(ends) <= blocks
    assert ends[0] >= base * longest
    assert last <= plan.stream_tokens
    assert plan.last_token == max(last, plan.tokens + 1)
    gaps = np.diff(ends)
    assert (gaps >= plan.block).all()
    if len(ends) > 1:
        assert gaps.max() - gaps.min() <= plan.block_grid  # even, to the grid
    if len(ends) < blocks:  # only for want of room
        assert plan.block_grid == plan.block
        assert len(ends) == plan.stream_tokens // plan.block - base * longest // plan.block + 1


def test_as_many_blocks_as_windows_cost_nothing():
    plan = make_plan(LadderSettings(multiples=(1, 8), blocks=5), 128 * 6, 16, None)
    assert plan.block_ends.tolist() == [128, 256, 384, 512, 640]
    assert plan.shared_ends(128).all()
    assert plan.shared_ends(16).all()


@pytest.mark.parametrize("length", [1, 2, 3, 7, 16, 96, 100, 1024])
def test_buckets_tile_the_positions_of_a_window(length):
    buckets = position_buckets(length)
    seen = [position for low, high in buckets for position in range(low, high)]
    assert seen == list(range(1, length + 1))


def test_buckets_are_two_per_octave_and_agree_between_lengths():
    assert position_buckets(16) == [
        (1, 2), (2, 3), (3, 4), (4, 5), (5, 7), (7, 9), (9, 13), (13, 17),
    ]  # fmt: skip
    assert position_buckets(64)[:8] == position_buckets(16)
    assert len(position_buckets(65536)) == len(position_buckets(32768)) + 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"multiples": ()}, "ladder multiples = "),
        ({"lengths": (0, 4)}, r"ladder lengths = \[0, 4\]"),
        ({"tokens": 0}, "ladder tokens = 0: expected at least 1"),
        ({"blocks": 0}, "ladder blocks = 0"),
        ({"forward_tokens": 0}, "ladder forward_tokens = 0"),
        ({"level": 95}, "ladder level = 95"),
        ({"protocols": ()}, "ladder protocols is empty"),
        ({"protocols": ("fix",)}, "ladder protocol 'fix'.*did you mean 'fixed'"),
    ],
)
def test_bad_settings_are_refused_in_one_line(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        LadderSettings(**options)
    assert "\n" not in str(caught.value)
