//! Tables of the documentation that tests generate from the code.

mod configuration;
mod limits;
