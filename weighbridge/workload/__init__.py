"""Input workloads: traces read from files, and generators of arrivals, lengths, prefixes and mixes.

Nothing here knows an instance or a policy. A workload is an iterator of `TraceRequest` in arrival order; every random
choice comes from a named, seeded stream (`streams.Streams`), so that adding a draw to one stream moves no other.

    from weighbridge.workload import mixes, readers, synthetic
    trace = readers.read_trace("azure_conv.2023.csv.gz").requests
    trace = list(mixes.mixed_bursty(rate=53.0).generate(seed=1, duration_s=300.0))
"""
