"""The gradient lists are those of the published models."""

import math
from collections import Counter

from gradsync.bench import models


def test_resnet50_has_torchvisions_parameters():
    shapes = models.resnet50()
    assert len(shapes) == 161
    assert sum(map(math.prod, shapes)) == 25_557_032
    assert shapes[:4] == [(64, 3, 7, 7), (64,), (64,), (64, 64, 1, 1)]
    assert shapes[-2:] == [(1000, 2048), (1000,)]
    dimensions = Counter(len(shape) for shape in shapes)
    assert dimensions == {4: 53, 1: 2 * 53 + 1, 2: 1}  # 53 convolutions, each with a batch norm; one dense layer


def test_resnet50_shortcuts_close_the_first_block_of_each_stage():
    shapes = models.resnet50()
    # Behind the stem's three arrays, and three convolutions with their norms, lies the first shortcut.
    assert shapes[12] == (256, 64, 1, 1)
    assert [Counter(shapes)[shape] for shape in ((512, 256, 1, 1), (1024, 512, 1, 1), (2048, 1024, 1, 1))] == [1, 1, 1]


def test_gpt2_small_has_the_checkpoints_parameters():
    shapes = models.gpt2_small()
    assert len(shapes) == 148
    assert sum(map(math.prod, shapes)) == 124_439_808
    assert shapes[:2] == [(50257, 768), (1024, 768)]
    assert Counter(shapes)[(768, 2304)] == 12
    assert shapes[-2:] == [(768,), (768,)]


def test_bert_base_has_the_checkpoints_parameters():
    shapes = models.bert_base()
    assert len(shapes) == 199
    assert sum(map(math.prod, shapes)) == 109_482_240
    assert round(sum(map(math.prod, shapes)) / 1e6, -1) == 110  # the paper's 110M
    assert shapes[:3] == [(30522, 768), (512, 768), (2, 768)]
    assert Counter(shapes)[(3072, 768)] == Counter(shapes)[(768, 3072)] == 12
    assert Counter(shapes)[(768, 768)] == 4 * 12 + 1  # attention, and the pooler
