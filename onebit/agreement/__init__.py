"""Agreement: what ranks tell each other before any of them goes on.

Votes before a step, equal replicas, skips, joins, foreign averaging.
"""
