"""From a configuration to running processes: Ray, placement, a group, a server."""
