"""Agreement: the messages by which ranks agree before any of them continues.

Votes before a step, equal replicas, skipped steps, uneven numbers of batches, and averaging by other libraries.
"""
