"""Steps whose index lies where the last one's did store, read and put back what others do."""

import numpy as np
import pytest

import kvcore
from tests.support import stories

torch = pytest.importorskip("torch")

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def told(spec, device, drafts, *, lent):
    """Digests after lives in which some steps are given up, and how many of the steps were lent their index."""
    cache = stories.create(spec, "torch_triton", device=device, max_draft_tokens=drafts, check=False)
    if not lent:
        cache._state._repeated_index = None
    requests = [cache.admit() for _ in range(3)]
    stories.tell(cache, {request: [*range(5 + number)] for number, request in enumerate(requests)})
    found, count, rng = [], 0, np.random.default_rng(3)
    for number in range(30):
        chosen = requests if number < 20 else requests[1:]
        tokens = rng.integers(0, 99, len(chosen)).tolist()
        step = cache.step(dict.fromkeys(chosen, 1))
        count += cache._state.is_lent
        # As handles have them: nobody asks for the index.
        positions = kvcore.to_numpy(step._device_index.positions).copy()
        assert positions.tolist() == [request.length for request in chosen]
        for layer, of in enumerate(cache.spec.all_layers):
            stories.feed_layer(step.layer(layer), of, layer, tokens, positions)
        step.abort() if number in (7, 13, 25) else step.commit()
        found.append(cache.digest())
    return found, count


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("spec", [stories.LATENT, stories.MIXED], ids=["latent", "mixed"])
def test_they_are_those_of_steps_with_an_index_of_their_own(spec, drafts, device):
    mine, count = told(spec, device, drafts, lent=True)
    others, none = told(spec, device, drafts, lent=False)
    assert mine == others
    assert none == 0
    assert count > 15
