from __future__ import annotations

import pytest

from foundry_lightning.schedule import lr_factor, mask_share


def factors(total: int, warmup: int, schedule: str, **settings: int) -> list[float]:
    return [lr_factor(k, total_steps=total, warmup_steps=warmup, schedule=schedule, **settings) for k in range(total)]


def test_linear_rises_over_the_warm_up_and_falls_to_the_last_update():
    assert factors(6, 2, "linear") == pytest.approx([1 / 2, 1, 1, 3 / 4, 1 / 2, 1 / 4])


def test_linear_without_warm_up():
    assert factors(6, 0, "linear") == pytest.approx([1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])


def test_cosine_is_half_at_half_way():
    assert factors(4, 0, "cosine") == pytest.approx([1, 0.8535534, 0.5, 0.1464466])


def test_constant_stays_at_the_peak_after_the_warm_up():
    assert factors(5, 2, "constant") == pytest.approx([0.5, 1, 1, 1, 1])


def test_wsd_stays_at_the_peak_and_falls_over_its_last_updates():
    assert factors(6, 2, "wsd", decay_steps=2) == pytest.approx([1 / 2, 1, 1, 1, 1, 1 / 2])
    assert factors(8, 0, "wsd", decay_steps=4) == pytest.approx([1, 1, 1, 1, 1, 3 / 4, 2 / 4, 1 / 4])


def test_wsd_decays_over_a_fifth_of_the_run_by_default_and_never_into_the_warm_up():
    assert factors(10, 1, "wsd") == pytest.approx([1, 1, 1, 1, 1, 1, 1, 1, 1, 1 / 2])
    assert factors(15, 0, "wsd") == pytest.approx([1] * 13 + [2 / 3, 1 / 3])
    assert factors(10, 9, "wsd") == pytest.approx([k / 9 for k in range(1, 10)] + [1])
    assert factors(3, 0, "wsd") == pytest.approx([1, 1, 1])


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_the_rate_is_zero_when_all_updates_are_done_and_after(schedule):
    assert lr_factor(10, total_steps=10, schedule=schedule) == pytest.approx(0)
    assert lr_factor(15, total_steps=10, schedule=schedule) == pytest.approx(0)


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="lr_scheduler must be one of .*'constant', 'wsd', got 'step'"):
        lr_factor(0, total_steps=1, schedule="step")


def test_the_mask_share_goes_straight_from_the_first_update_to_the_last():
    shares = [mask_share(k, total_steps=4, start=0.3, end=0.15) for k in range(6)]
    assert shares == pytest.approx([0.3, 0.25, 0.2, 0.15, 0.15, 0.15])
    assert mask_share(0, total_steps=1, start=0.3, end=0.15) == 0.3
