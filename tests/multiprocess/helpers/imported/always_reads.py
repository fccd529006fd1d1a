"""Has the activation cache read whatever that costs: a model this small computes faster."""

from timelyfreeze.front.caching.verdict import CacheDecision

CacheDecision.pays = True
