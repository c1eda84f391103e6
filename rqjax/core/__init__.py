"""Foundations: quantizers, pytrees, checks, registries, platforms, and the dispatch of operations."""

from rqjax.core.checks import (
    as_array as as_array,
    check_data as check_data,
    check_fits as check_fits,
    check_floats as check_floats,
    check_int as check_int,
    check_ints as check_ints,
    check_positive as check_positive,
    check_text as check_text,
    check_vectors as check_vectors,
    is_traced as is_traced,
)
from rqjax.core.dispatch import (
    Operation as Operation,
    Refusal as Refusal,
    Unsupported as Unsupported,
    operation as operation,
)
from rqjax.core.pytree import pytree as pytree, static as static
from rqjax.core.quantizer import (
    Codes as Codes,
    Quantizer as Quantizer,
    Queries as Queries,
    Vectors as Vectors,
    Wrapper as Wrapper,
    nbytes as nbytes,
)
from rqjax.core.random import Key as Key
from rqjax.core.registry import (
    ELSEWHERE as ELSEWHERE,
    Registry as Registry,
    UnknownName as UnknownName,
    nest as nest,
    unknown_name as unknown_name,
)
from rqjax.core.token_array import PAGE as PAGE, TokenArray as TokenArray
