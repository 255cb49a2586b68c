import pytest


@pytest.fixture(params=["reference", "torch_triton"])
def backend(request: pytest.FixtureRequest) -> str:
    """The backends that every case runs on."""
    return request.param
