//! Arrays of every type, and comparisons with them.
