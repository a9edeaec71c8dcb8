"""Flash attention inside Flax: an ``attention_fn`` for both of Flax's attention layers, and one-line switches.

Everything here uses only the public names of ``pallas_flash``.
"""

from .attention_fn import attention_fn, make_attention_fn
from .switch import flash_layers, use_flash, use_reference

__all__ = ["attention_fn", "flash_layers", "make_attention_fn", "use_flash", "use_reference"]
