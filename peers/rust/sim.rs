//! A simulated device for a peer to build its own device on.
