"""``dledger.late_names``, and the packages that use it."""

from __future__ import annotations

from types import ModuleType

import pytest

import dledger.client
import rocketstore.client
from dledger.late_names import late_names


@pytest.mark.parametrize("package", [dledger.client, rocketstore.client])
def test_every_public_name_of_a_package_can_be_loaded(package: ModuleType) -> None:
    """A name that is promised but missing would be found by a user only."""
    for name in package.__all__:
        assert getattr(package, name) is getattr(package, name), name


@pytest.mark.parametrize("package", [dledger.client, rocketstore.client])
def test_a_name_that_a_package_does_not_have_is_an_attribute_error(package: ModuleType) -> None:
    """``hasattr`` and ``from … import`` rely on it."""
    with pytest.raises(AttributeError, match=rf"module '{package.__name__}' has no attribute 'Nothing'"):
        _ = package.Nothing


def test_a_name_is_loaded_from_its_own_module() -> None:
    """The package's name plays no part in where a name comes from."""
    load = late_names("somewhere", {"late_names": "dledger.late_names"})

    assert load("late_names") is late_names
