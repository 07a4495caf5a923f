"""The engines that a simulated process runs on."""
