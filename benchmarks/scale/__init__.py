"""Many ranks simulated by a few processes, to see how a rendezvous server takes them."""
