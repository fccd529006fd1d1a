"""What a trainer that is built gets for freezing: clocks, a controller, a store for its front."""
