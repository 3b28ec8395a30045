"""The dimensions agree with each other and with the shapes that the kernels are specified for."""

import dataclasses

import pytest
from hopper_kernels import models


def test_v41_flash():
    flash = models.V41_FLASH
    assert (flash.hidden, flash.layers, flash.hc, flash.sinkhorn_iters) == (5120, 40, 4, 20)
    assert flash.hc * flash.hidden == 20480
    assert flash.heads * flash.head_dim == 32768
    assert flash.rope_dim * 8 == flash.head_dim
    assert flash.index_topk + flash.window == 640
    assert (flash.index_heads, flash.index_head_dim) == (32, 128)
    assert flash.index_block_size * flash.index_topk_blocks == 16384
    assert (flash.rms_eps, flash.hc_eps) == (1e-20, 1e-6)
    # All channels that are cast to FP8 come in blocks of 128.
    for channels in (flash.hidden, flash.q_lora_rank, flash.head_dim, flash.moe_intermediate):
        assert channels % 128 == 0
    assert 3 * flash.hidden * flash.moe_intermediate == 35_389_440


def test_the_family():
    assert [(model.hidden, model.hc, model.rms_eps) for model in models.FAMILY] == [
        (5120, 4, 1e-20),
        (4096, 4, 1e-6),
        (7168, 4, 1e-6),
    ]
    assert len({model.name for model in models.FAMILY}) == 3


def test_dimensions_are_frozen_and_hashable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        models.V41_FLASH.hidden = 1
    assert len(set(models.FAMILY)) == 3
