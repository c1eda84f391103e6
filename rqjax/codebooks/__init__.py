"""Codebooks: Lloyd-Max levels, and the levels of trellises (`codebooks.trellis_tables`)."""

from rqjax.codebooks.lloyd_max import (
    MAX_BITS as MAX_BITS,
    beta as beta,
    distortion as distortion,
    entropy_coded as entropy_coded,
    gaussian as gaussian,
    integer as integer,
    probabilities as probabilities,
)
