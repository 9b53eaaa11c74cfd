import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kernels_integration.noise import (
    MAX_GUMBEL,
    MIN_GUMBEL,
    exponential,
    gumbel,
    random_bits,
    random_bits_at,
    uniform,
)
from kernels_integration.philox import Purpose, choice_seed, philox4x32, split64

# Random123, tests/kat_vectors: rounds, counter, key, result.
KNOWN_ANSWERS = [
    (7, "00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (7, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (10, "00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return tuple(int(word, 16) for word in text.split())


def as_int64(value):
    return value - 2**64 if value >= 2**63 else value


@pytest.mark.parametrize(("rounds", "counter", "key", "result"), KNOWN_ANSWERS)
def test_known_answers_hold_for_ints_and_tensors(rounds, counter, key, result):
    assert philox4x32(words(counter), words(key), rounds) == words(result)
    tensors = philox4x32(
        tuple(torch.tensor([word]) for word in words(counter)),
        tuple(torch.tensor([word]) for word in words(key)),
        rounds,
    )
    assert tuple(int(word) for word in tensors) == words(result)


seeds = st.integers(0, 2**64 - 1)
positions = st.integers(0, 2**40)


@given(seed=seeds, position=positions, token=st.integers(0, 2**20), purpose=st.sampled_from(Purpose))
def test_bits_of_a_token_are_its_word_of_the_documented_counter(seed, position, token, purpose):
    low, high = split64(position)
    expected = philox4x32((token // 4, low, high, int(purpose)), split64(seed))[token % 4]
    row = torch.tensor([as_int64(seed)]), torch.tensor([position])
    assert random_bits_at(*row, torch.tensor([token]), purpose).item() == expected
    assert random_bits(*row, token, 1, purpose).item() == expected


@given(start=st.integers(0, 60), count=st.integers(1, 60), rows=st.integers(1, 5), seed=seeds)
def test_noise_is_the_same_number_in_every_slice_and_batch(start, count, rows, seed):
    seed_rows = torch.arange(rows) * 977 + as_int64(seed) // 2
    position_rows = torch.arange(rows) + 2**33
    whole = gumbel(random_bits(seed_rows, position_rows, 0, 120))
    part = gumbel(random_bits(seed_rows, position_rows, start, count))
    assert torch.equal(part, whole[:, start : start + count])
    alone = gumbel(random_bits(seed_rows[-1:], position_rows[-1:], start, count))
    assert torch.equal(alone[0], part[-1])
    token = torch.arange(start, start + count)
    single = gumbel(random_bits_at(seed_rows[0].expand(count), position_rows[0].expand(count), token))
    assert torch.equal(single, part[0])


def test_many_rows_and_a_large_vocabulary_are_cut_into_the_same_numbers():
    seed, position = torch.tensor([3, -5, 2**62]), torch.tensor([0, 7, 2**34])
    start, count = 2**17 - 3, 70_001
    bits = random_bits(seed, position, start, count)
    probe = torch.randint(count, (500,), generator=torch.Generator().manual_seed(1))
    for row in range(3):
        alone = random_bits_at(seed[row].expand(500), position[row].expand(500), probe + start)
        assert torch.equal(alone, bits[row, probe])
    many = random_bits(torch.arange(40), torch.arange(40), 5, 6144)
    for row in (0, 9, 10, 11, 39):
        assert torch.equal(many[row], random_bits(torch.tensor([row]), torch.tensor([row]), 5, 6144)[0])


def test_no_two_inputs_share_a_block():
    base = {"seed": 5, "position": 9, "token": 40, "purpose": Purpose.COUPLED}
    changes = [{"seed": 6}, {"seed": 5 + 2**32}, {"position": 10}, {"position": 9 + 2**32}, {"token": 44}]
    changes += [{"purpose": purpose} for purpose in Purpose if purpose is not Purpose.COUPLED]
    seen = set()
    for change in [{}, *changes]:
        case = base | change
        bits = random_bits(
            torch.tensor([case["seed"]]), torch.tensor([case["position"]]), case["token"], 4, case["purpose"]
        )
        seen |= set(bits[0].tolist())
    assert len(seen) == 4 * (1 + len(changes))


def test_gumbel_range_is_that_of_its_extreme_words():
    extremes = gumbel(torch.tensor([0, 2**32 - 1]))
    assert extremes.tolist() == pytest.approx([MAX_GUMBEL, MIN_GUMBEL], rel=1e-12)
    assert pytest.approx(33 * math.log(2), rel=1e-9) == MAX_GUMBEL
    assert torch.isfinite(extremes).all()


def test_noise_has_the_distributions_it_is_named_for():
    bits = random_bits(torch.tensor([12345]), torch.tensor([1]), 0, 200_000)[0]
    assert stats.kstest(uniform(bits, torch.float64).numpy(), "uniform").pvalue > 0.01
    assert stats.kstest(exponential(bits).numpy(), "expon").pvalue > 0.01
    assert stats.kstest(gumbel(bits).numpy(), "gumbel_r").pvalue > 0.01
    each_bit = torch.stack([(bits >> i) & 1 for i in range(32)]).double().mean(dim=1)
    assert (each_bit - 0.5).abs().max() < 5 * 0.5 / math.sqrt(200_000)


def test_choice_seeds():
    seed = 0xFEDCBA9876543210
    assert choice_seed(seed, 0) == seed
    assert choice_seed(as_int64(seed), 0) == seed
    derived = [choice_seed(seed, i) for i in range(1, 200)]
    assert len({seed, *derived}) == 200
    assert all(0 <= value < 2**64 for value in derived)
    assert [choice_seed(as_int64(seed), i) for i in range(1, 200)] == derived
    first = philox4x32((1, 0, 0, int(Purpose.CHOICE_SEED)), split64(seed))
    assert derived[0] == first[0] + (first[1] << 32)
