"""The configuration refuses what it can't mean, by name."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassFieldValidationError
from small import config_of
from transformers import AutoConfig

from farfield import FarfieldConfig


def test_defaults_follow_from_the_width() -> None:
    config = FarfieldConfig(hidden_size=96, num_attention_heads=3, mechanism="alibi+v+learned")
    assert config.head_dim == 32
    assert config.num_key_value_heads == 3
    assert config.intermediate_size == 256
    assert config.mechanism == "learned+v+alibi"
    assert config.geometry(2).mixing_window == config.train_length == 512
    assert config_of(mixing_window=100).geometry(0).mixing_window == 100


def test_a_configuration_comes_back_from_disk(tmp_path: Path) -> None:
    config = config_of("learned:c=0.12345678+v", rope_base=500.0, seed=7, eos_token_id=[1, 2])
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(again, FarfieldConfig)
    assert again.to_diff_dict() == config.to_diff_dict()
    assert again.geometry(1) == config.geometry(1)
    assert again.mechanism == "learned:c=0.12345678+v"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hiden_size": 3}, "unknown FarfieldConfig key 'hiden_size'; did you mean 'hidden_size'?"),
        ({"mecanism": "rope"}, "did you mean 'mechanism'?"),
        ({"zzz": 3}, "unknown FarfieldConfig key 'zzz'"),
        ({"mechanism": "leraned"}, "unknown mechanism 'leraned' .*did you mean 'learned'?"),
        ({"num_attention_heads": 3}, "hidden_size 16 is not a multiple of num_attention_heads 3"),
        ({"num_key_value_heads": 3}, "2 query heads cannot share 3 key/value heads evenly"),
        ({"num_key_value_heads": 0}, "kv_heads is 0; expected at least 1"),
        ({"head_dim": 7}, "head_dim is 7; rotations need an even number"),
        ({"head_dim": 0}, "head_dim is 0; expected at least 1"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"train_length": 0}, "train_length is 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"intermediate_size": -8}, "intermediate_size is -8"),
        ({"rope_base": 0.0}, "rope_base is 0"),
        ({"mechanism": "random", "mixing_window": 3}, "mixing_window is 3 tokens"),
        ({"mechanism": "learned:std=-1"}, "option 'std' of 'learned' is -1"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        config_of(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "16"),
        ("num_attention_heads", 2.0),
        ("train_length", None),
        ("use_cache", "yes"),
        ("seed", 0.5),
        ("mixing_window", 99.5),
    ],
)
def test_a_wrong_type_names_its_field(key: str, value: Any) -> None:
    with pytest.raises(StrictDataclassFieldValidationError, match=f"field '{key}'"):
        config_of(**{key: value})
    with pytest.raises(StrictDataclassFieldValidationError, match=f"field '{key}'"):
        setattr(config_of(), key, value)


def test_odd_heads_are_fine_where_nothing_rotates() -> None:
    assert config_of("alibi", head_dim=7).head_dim == 7
    assert config_of(rope_base=100).geometry(0).rope_base == 100
