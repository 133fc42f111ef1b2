//! The async device stream: `ArrowAsyncDeviceStreamHandler`, as consumer and as producer (feature `async`).
//!
//! In a pull stream the consumer calls the producer. Here the producer calls the consumer, who says how much it can take:
//!
//! | who | does | with |
//! | --- | --- | --- |
//! | consumer | makes a handler, and a future of its stream | [`AsyncDeviceRecordBatchStream::handler`] |
//! | | gives the C struct to any producer | [`AsyncStreamHandler::into_raw`], [`into_ffi`](AsyncStreamHandler::into_ffi) |
//! | | awaits the schema, then batches with their metadata | [`Opening`], [`AsyncDeviceRecordBatchStream`] |
//! | producer | is given a handler and has a stream of device batches | [`produce`], [`produce_at`] |
//! | | spawns the future anywhere | [`Produce`] |
//!
//! No executor is imposed and no poll waits (but for an upload of a single batch of more than 128 MiB): the device wakes the task. Streams are [`DeviceRecordBatchStream`]s, and turn into
//! each other: any [`Stream`](futures_core::Stream) ([`DeviceRecordBatchStreamAdapter`]), host batches ([`UploadingStream`]),
//! readers ([`ReaderStream`]), host batches again ([`HostRecordBatchStream`]), a reader ([`BlockingReader`]). So
//! `stream.into_host_stream()` is arrow-rs's `RecordBatchStream` of any producer's data, on whatever device it is.
//!
//! # The rules
//!
//! Those of the specification ("Async Device Stream Interface") and of `abi.h`, with what this crate adds where they leave
//! a choice, and the test of each in `tests/async_stream`. **C** is the consumer, **P** the producer.
//!
//! | rule | who keeps it, and how | test |
//! | --- | --- | --- |
//! | P sets `producer` before its first call | C refuses null, and null callbacks, with EINVAL | `a_schema_without_a_producer_is_refused`, `a_producer_without_request_or_cancel_is_refused` |
//! | `on_schema` is the first call, and comes once | P: within the first poll; C refuses others | `the_schema_comes_with_the_first_poll_and_no_demand`, `a_task_before_the_schema_is_refused`, `a_second_schema_is_refused_after_the_batches_before_it` |
//! | the schema is C's, the struct is not | C moves it, and releases it whatever comes | `a_schema_that_cannot_be_imported_is_refused`, `a_null_schema_is_refused` |
//! | P's metadata lives as long as its struct | C copies it within the call | `metadata_of_the_stream_and_of_batches_is_copied` |
//! | a refused call is followed by `release` alone | P; no `on_error` | `a_refused_schema_is_followed_by_the_release_alone`, `a_refused_task_is_followed_by_the_release_alone` |
//! | a callback that panics or throws | P takes it for a refusal with EIO | `a_panic_of_the_consumer_is_a_refusal` |
//! | tasks come only on demand | C requests its depth within `on_schema`, then one for each that is taken; it refuses more | `one_more_is_requested_for_each_task_after_its_extraction`, `a_task_beyond_what_was_requested_is_refused`, `no_more_comes_than_was_requested` |
//! | `request` may be called within callbacks, and calls none | P: it sets a number and wakes the task | `a_request_wakes_and_calls_nothing_itself`, `a_request_from_inside_on_next_task_is_served_after_it` |
//! | `request(n)` with n <= 0 is an error | P: `on_error(EINVAL)` | `a_request_of_0_or_less_is_an_error` |
//! | sums of requests | P: they saturate | `requests_saturate` |
//! | after `cancel` and after the end `request` does nothing | P | `cancel_is_followed_by_the_release_alone`, `cancel_after_the_end_changes_nothing` |
//! | back-pressure blocks nobody | P's future is pending; one batch is made ahead | `a_consumer_that_never_requests_blocks_nobody`, `one_batch_is_made_ahead_of_the_demand` |
//! | callbacks never overlap, from whatever thread | P: only its polls call; C takes them from any | `the_handler_is_called_by_who_polls_and_nobody_else`, `callbacks_may_come_from_several_threads_in_turn` |
//! | every batch has the stream's schema | P refuses others; C checks each array against it | `a_batch_of_another_schema_is_an_error`, `an_array_that_does_not_fit_the_schema_is_an_error` |
//! | a task is extracted exactly once, with null if nobody wants it | C: when it is taken, or dropped | `nothing_is_extracted_inside_the_call`, `a_dropped_stream_cancels_and_extracts_with_null` |
//! | `extract_data` cleans up; the array is C's | P has built the array before, so that it only moves | `an_export_that_fails_is_an_error`, `a_task_that_is_not_wanted_releases_its_array` |
//! | `extract_data` fails | C: that item's error, with P's own text if it has come; the stream ends and is cancelled | `a_failed_extraction_is_that_items_error_and_the_streams_end`, `a_failed_extraction_is_told_with_the_producers_own_error` |
//! | `extract_data` writes nothing, or another device's array | C refuses it | `an_extraction_that_sets_nothing_is_refused`, `an_array_of_another_device_type_is_released_and_refused` |
//! | the end is a null task | P: without demand, before queued tasks are taken | `the_end_needs_no_demand` |
//! | nothing but `release` follows the end | C refuses calls, and the stream stays whole | `a_task_after_the_end_is_refused`, `an_error_after_the_end_is_ignored` |
//! | after an error only `release` follows | P; C gives the batches before it first | `an_error_goes_out_with_errno_text_and_metadata`, `an_error_comes_after_the_batches_before_it` |
//! | an error may come at any time, and twice | C keeps the first | `an_error_before_the_schema_is_the_openings`, `a_second_error_is_ignored` |
//! | `on_error` and `release` call nothing of P | C | `an_error_never_calls_the_producer` |
//! | texts and metadata live during the call | C copies | `any_code_text_and_metadata_of_an_error_will_do` |
//! | `cancel` calls no handler | P: it sets a mark and wakes the task | `cancel_from_inside_on_schema_and_on_next_task`, `a_cancel_before_the_schema_is_followed_by_the_release_alone` |
//! | `cancel` is idempotent, from any thread, and no error | P: `release` follows; C: when its stream is dropped before the end | `cancel_is_followed_by_the_release_alone`, `a_cancel_of_another_thread_ends_a_stream_that_never_ends`, `a_stream_that_has_ended_is_not_cancelled` |
//! | no schema was told | C answers ECANCELED if its opening was dropped | `a_schema_for_a_dropped_opening_is_cancelled` |
//! | after `cancel` tasks may still come | C extracts them with null | `a_dropped_stream_cancels_and_extracts_with_null` |
//! | `release` is the last call | P: once, also when its future is dropped, after `on_error(ECANCELED)` then | `a_produce_dropped_in_the_middle_tells_its_consumer` |
//! | `release` without an end | C: an error (EPIPE), so that no cut stream looks whole | `a_release_before_the_end_is_an_error` |
//! | | P's task does not wait in it for a call that wakes the task | `a_release_does_not_wait_for_who_wakes_the_task` |
//! | P's struct is valid until `release` | C calls it no more then; `release` waits for a call that another thread is in | `a_release_waits_for_a_request_in_another_thread`, `nothing_is_requested_after_the_end_an_error_or_the_release` |
//! | | P keeps it until the last task is extracted, since Arrow C++ requests before it extracts | `tasks_may_be_taken_after_the_release_and_the_producers_end` |
//! | all arrays are on P's device type | P refuses others; C too | `a_batch_on_another_type_of_device_is_an_error` |
//!
//! What each side holds while the other runs is two small state machines without pointers; a model checker (loom) runs them
//! in all orders (the workspace's package `async-model`).

mod adapters;
mod consumer;
mod items;
mod producer;
mod sync;

pub use adapters::{BlockingReader, HostRecordBatchStream, ReaderStream, UploadingStream};
pub use consumer::{AsyncDeviceRecordBatchStream, AsyncStreamHandler, Batches, Opening};
pub use items::{AsyncBatch, DeviceRecordBatchStream, DeviceRecordBatchStreamAdapter};
pub use producer::{Outcome, Produce, ProduceOptions, produce, produce_at};
