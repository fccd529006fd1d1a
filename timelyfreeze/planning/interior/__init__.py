"""The linear program solved from the inside, for pipelines of many thousand actions.

``solver`` is what ``lp`` calls; docs/solving.md says why and how.
"""
