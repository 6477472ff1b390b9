"""Philox against the published known-answer vectors, and the independence that decoding relies on."""

import torch

from flashspark.kernels.philox import philox4x32, step_uniforms

KNOWN_ANSWERS = [  # counter, key, result: Random123's kat_vectors for philox4x32, 10 rounds
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def test_published_vectors():
    counter = torch.tensor([answer[0] for answer in KNOWN_ANSWERS])
    key = torch.tensor([answer[1] for answer in KNOWN_ANSWERS])
    assert philox4x32(counter, key).tolist() == [list(answer[2]) for answer in KNOWN_ANSWERS]


def test_a_draw_depends_on_its_own_request_only():
    seeds, choices, steps = torch.tensor([7, 8, -3]), torch.tensor([0, 1, 0]), torch.tensor([5, 5, 9])
    together = step_uniforms(seeds, choices, steps, 8)
    for i in range(3):
        alone = step_uniforms(seeds[i : i + 1], choices[i : i + 1], steps[i : i + 1], 8)
        assert torch.equal(together[i], alone[0])
    assert torch.equal(step_uniforms(seeds, choices, steps, 3), together[:, :3])


def test_seed_choice_step_row_and_purpose_all_matter():
    def draw(seed, choice, step):
        return step_uniforms(torch.tensor([seed]), torch.tensor([choice]), torch.tensor([step]), 4)

    drawn = torch.cat([draw(1, 0, 0), draw(2, 0, 0), draw(1, 1, 0), draw(1, 0, 1), draw(1 + (1 << 40), 0, 0)])
    assert drawn.unique().numel() == drawn.numel()


def test_uniform_moments():
    u = step_uniforms(torch.arange(2000), torch.zeros(2000, dtype=torch.int64), torch.arange(2000), 8)
    assert u.min() > 0.0 and u.max() < 1.0
    assert abs(u.mean() - 0.5) < 0.005
    assert abs(u.var() - 1 / 12) < 0.002
