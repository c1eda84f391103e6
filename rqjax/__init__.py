"""rqjax: vector quantization of key-value caches and embeddings in JAX.

    q = rqjax.eden(jax.random.key(0), dim=128, bits=3)    a quantizer: a pytree, random but for its dimension and bits
    codes = q.encode(x)                                   also decode(codes), dot(y, codes), bits_per_vector

By what is known of the vectors
    METHODS, of nothing: eden eden_unbiased turboquant turboquant_mixed turboquant_prod turboquant_prod_orthogonal
        rotorquant rotorquant_prod rotorquant_paper rotorquant_paper_prod rotor_chain hadamard planarquant isoquant
        identity rtn affine affine_rotated affine_rotated_sign
        turboquant_trellis turboquant_trellis_unbiased rotorquant_trellis nested_e8
    FITTED, of samples: klt_trellis rotorquant_learned rotor_chain_learned rotorquant_allocated
        rotorquant_allocated_trellis pq opq lopq qet oscar
    BUDGETED, of the very matrix: fit_under_budget
Operations on any quantizer
    encode decode roundtrip straight_through nbytes save load
Keys and values
    STRATEGIES strategy Strategy KVCache Rope append attend dot_product_attention grow truncate requantize PagedCache
    AsGiven SubtractedMean TurnedMean BeforeRope LastPart, in what form a cache has keys and values
    rqjax.nn for flax
Nearest neighbors
    Index IVF
Training
    fit parameters losses learning
Parts, which nest
    Normalized Scaled Gain Centered Rotated Residual Split PerHead PerChannel Balanced Clipped Local
    Scalar lloyd_max Affine MinMax Uniform Blocks Columns Trellis trellis_coded TrellisColumns NestedE8 Product
    Exchange Exact Sign
    rotations codebooks packing
New ones
    Quantizer Codes pytree static
What is measured, and bounds for it
    metrics theory
Kernels, and errors
    kernels Unsupported UnknownName extras

The guide is rqjax/README.md; help(rqjax.eden), say, tells more of each name.
"""

import re as _re

from rqjax import (
    backends as kernels,  # noqa: F401
    codebooks as codebooks,
    learning as learning,
    metrics as metrics,
    rotations as rotations,
    theory as theory,
)
from rqjax.arrays import packing as packing
from rqjax.cache.append import append as append, grow as grow
from rqjax.cache.attention import attend as attend, dot_product_attention as dot_product_attention
from rqjax.cache.key_forms import (
    AsGiven as AsGiven,
    BeforeRope as BeforeRope,
    SubtractedMean as SubtractedMean,
    TurnedMean as TurnedMean,
)
from rqjax.cache.kv import KVCache as KVCache, LastPart as LastPart
from rqjax.cache.requantize import requantize as requantize
from rqjax.cache.strategy import Strategy as Strategy
from rqjax.cache.truncate import truncate as truncate
from rqjax.core import extras as extras
from rqjax.core.dispatch import Unsupported as Unsupported
from rqjax.core.pytree import pytree as pytree, static as static
from rqjax.core.quantizer import (
    Codes as Codes,
    Quantizer as Quantizer,
    decode as decode,
    encode as encode,
    nbytes as nbytes,
    roundtrip as roundtrip,
    straight_through as straight_through,
)
from rqjax.core.registry import UnknownName as UnknownName
from rqjax.learning import losses as losses
from rqjax.learning.parameters import parameters as parameters
from rqjax.learning.training import fit as fit
from rqjax.paging.paged import PagedCache as PagedCache
from rqjax.quantizers.affine import Affine as Affine, MinMax as MinMax
from rqjax.quantizers.balanced import Balanced as Balanced
from rqjax.quantizers.block_formats import Blocks as Blocks
from rqjax.quantizers.clipped import Clipped as Clipped
from rqjax.quantizers.combinators import (
    Centered as Centered,
    Normalized as Normalized,
    Residual as Residual,
    Rotated as Rotated,
    Scaled as Scaled,
    Split as Split,
)
from rqjax.quantizers.exact import Exact as Exact
from rqjax.quantizers.exchange import Exchange as Exchange
from rqjax.quantizers.gain import Gain as Gain
from rqjax.quantizers.nested_e8 import NestedE8 as NestedE8
from rqjax.quantizers.per_cell import Local as Local
from rqjax.quantizers.per_channel import PerChannel as PerChannel
from rqjax.quantizers.per_coordinate import Columns as Columns
from rqjax.quantizers.per_head import PerHead as PerHead
from rqjax.quantizers.product import Product as Product
from rqjax.quantizers.scalar import Scalar as Scalar, lloyd_max as lloyd_max
from rqjax.quantizers.trellis import Trellis as Trellis
from rqjax.quantizers.trellis_per_coordinate import TrellisColumns as TrellisColumns, trellis_coded as trellis_coded
from rqjax.quantizers.uniform import Uniform as Uniform
from rqjax.recipes.budget import BUDGETED as BUDGETED, fit_under_budget as fit_under_budget
from rqjax.recipes.fitted import FITTED as FITTED
from rqjax.recipes.klt import klt_trellis as klt_trellis
from rqjax.recipes.learned import (
    rotor_chain_learned as rotor_chain_learned,
    rotorquant_allocated as rotorquant_allocated,
    rotorquant_allocated_trellis as rotorquant_allocated_trellis,
    rotorquant_learned as rotorquant_learned,
)
from rqjax.recipes.methods import (
    METHODS as METHODS,
    affine as affine,
    affine_rotated as affine_rotated,
    affine_rotated_sign as affine_rotated_sign,
    eden as eden,
    eden_unbiased as eden_unbiased,
    hadamard as hadamard,
    identity as identity,
    isoquant as isoquant,
    nested_e8 as nested_e8,
    planarquant as planarquant,
    rotor_chain as rotor_chain,
    rotorquant as rotorquant,
    rotorquant_paper as rotorquant_paper,
    rotorquant_paper_prod as rotorquant_paper_prod,
    rotorquant_prod as rotorquant_prod,
    rotorquant_trellis as rotorquant_trellis,
    rtn as rtn,
    turboquant as turboquant,
    turboquant_mixed as turboquant_mixed,
    turboquant_prod as turboquant_prod,
    turboquant_prod_orthogonal as turboquant_prod_orthogonal,
    turboquant_trellis as turboquant_trellis,
    turboquant_trellis_unbiased as turboquant_trellis_unbiased,
)
from rqjax.recipes.oscar import oscar as oscar
from rqjax.recipes.product import lopq as lopq, opq as opq, pq as pq, qet as qet
from rqjax.recipes.sketches import Sign as Sign
from rqjax.recipes.strategies import STRATEGIES as STRATEGIES, strategy as strategy
from rqjax.rotations import Rope as Rope
from rqjax.search.index import Index as Index
from rqjax.search.ivf import IVF as IVF
from rqjax.storage import load as load, save as save

__version__ = "0.1.0"
__all__ = [name for name in _re.findall(r"\w+", __doc__) if name in globals() and name != "rqjax"]  # pyright: ignore
