"""What a policy is trained and judged on: the simulated server, its workloads, acceptance and costs."""
