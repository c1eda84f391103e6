"""Products with codes that are not decoded, which caches and indexes share."""

from rqjax.scoring import leaves as leaves, rules as rules  # all rules are there once this package is
