"""How step messages and requests travel: ZeroMQ between processes, direct calls inside one."""
