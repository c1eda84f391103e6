"""Products with codes that are not decoded, which caches and indexes share. All rules are there once it is imported."""

from rqjax.scoring import leaves as leaves, rules as rules, streams as streams
