"""The engines that simulated processes run on, and snapshots of what the engines hold."""
