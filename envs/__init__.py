"""What a policy is trained and judged on: the simulated server, its workloads, acceptance and costs.

With Gymnasium installed, importing this package registers `draftdial/Speculation-v0` and, for a real server,
`draftdial/LiveSpeculation-v0`.
"""

try:
    import gymnasium
except ModuleNotFoundError:  # workloads, costs and the simulator do without
    pass
else:
    gymnasium.register(
        "draftdial/Speculation-v0",
        entry_point="draftdial.envs.speculation_env:SpeculationEnv",
        vector_entry_point="draftdial.envs.registration:make_vector",
    )
    gymnasium.register(
        "draftdial/LiveSpeculation-v0",
        entry_point="draftdial.envs.live_env:LiveSpeculationEnv",
        nondeterministic=True,  # times are measured
    )
