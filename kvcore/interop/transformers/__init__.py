"""A kvcore cache in the place of a ``transformers`` model's own (transformers 5.24 or newer).

```python
from kvcore.interop.transformers import KVCache

with KVCache(model, batch=5, max_length=512, formats="int8_row") as cache:
    tokens = model.generate(**inputs, cache=cache, max_new_tokens=64)
```

Many requests that come and go share a cache through ``PackedModel``, whose forwards are steps of any of them.

The model computes attention; kvcore stores, quantises, rolls back and moves what attention reads. Padding tokens are
stored like any others, as the model's own cache stores them: positions are columns of the padded batch, and all rows of
a batch have the same length. Only inference is supported: no gradient flows through the cache.
"""

from kvcore.interop.transformers.cache import KVCache
from kvcore.interop.transformers.packed import PackedModel
from kvcore.interop.transformers.spec import cache_spec

__all__ = ["KVCache", "PackedModel", "cache_spec"]
