"""Each paper in one plain file, to be read: NumPy, float64, all workers in a loop. Nothing here imports the package.

    onebit_adam    1-bit Adam, and the momentum that 1-bit LAMB shares
    onebit_lamb    1-bit LAMB
    zero_one_adam  0/1 Adam
    onebit_muon    Muon in one bit
    laprop         LaProp
    local_steps    AdamW on each worker, a round in one bit every N steps
    sharded        the first three with their state divided over the workers
    codecs         one bit, four and eight

The tests compare the optimizers with these. They are slow, have no network, and do not check shapes.
"""
