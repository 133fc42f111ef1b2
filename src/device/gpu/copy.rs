//! Lists of copies.

use std::sync::atomic::Ordering;

use super::api::RawStream;
use super::context::{Context, Current};
use super::jobs::Job;
use super::runtime::{Memory, Peer, PointerKind};
use super::shared::Shared;
use crate::device::backend::{CopyKind, CopyOp, DevicePtr};
use crate::error::{Error, Result};

/// From this many copies on the runtime is given the list in one call: about 0.5 us a copy instead of
/// 2.3 us a call, for a few us more (reported for CUDA on H100 and H20; not yet measured by this project).
const LIST: usize = 8;

/// Gives a list of copies to a stream.
///
/// # Safety
/// As [`RawQueue::copy`](crate::device::RawQueue::copy).
pub(super) unsafe fn run(
    shared: &Shared,
    stream: RawStream,
    copies: &[CopyOp],
    current: &Current<'_>,
) -> Result<()> {
    let context = &*shared.context;
    if copies
        .iter()
        .any(|copy| copy.bytes == 0 || copy.src.is_null() || copy.dst.is_null())
    {
        return Err(Error::argument("an empty copy, or one from or to null"));
    }
    if shared.memory == Memory::Host {
        // Between host memories the runtime would copy at once, on this thread, after waiting for
        // the stream.
        let (mut host, mut device) = (Vec::new(), Vec::new());
        for copy in copies {
            match is_between_hosts(context, copy, current)? {
                true => host.push(*copy),
                false => device.push(*copy),
            }
        }
        let plain = device.iter().map(|copy| (copy, None));
        // SAFETY: the caller's.
        unsafe { one_by_one(context, current, stream, plain) }?;
        if host.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller's; these are between hosts.
        let queued = unsafe { context.queue_job(current, stream, Job::Copy(host)) };
        if queued.is_err() && !device.is_empty() {
            wait_for(context, current, stream);
        }
        return queued;
    }
    // Imported arrays may mix kinds of memory: each copy between devices is asked about.
    let (mut plain, mut named) = (Vec::new(), Vec::new());
    if copies
        .iter()
        .any(|copy| copy.kind == CopyKind::DeviceToDevice)
    {
        for copy in copies {
            let from = match copy.kind {
                CopyKind::DeviceToDevice => peer_of(context, copy.src, current)?,
                _ => None,
            };
            match from {
                Some(_) => named.push((copy, from)),
                None => plain.push(*copy),
            }
        }
    }
    let plain = if named.is_empty() { copies } else { &plain };
    // SAFETY: the caller's.
    unsafe { plain_copies(context, current, stream, plain) }?;
    // SAFETY: the caller's.
    let done = unsafe { one_by_one(context, current, stream, named.into_iter()) };
    if done.is_err() && !plain.is_empty() {
        wait_for(context, current, stream);
    }
    done
}

/// Copies whose direction the runtime finds by their addresses.
///
/// # Safety
/// As [`run`].
unsafe fn plain_copies(
    context: &Context,
    current: &Current<'_>,
    stream: RawStream,
    copies: &[CopyOp],
) -> Result<()> {
    // The legacy default stream takes no lists.
    let takes_lists = !stream.is_legacy() && !context.no_lists.load(Ordering::Relaxed);
    // SAFETY: the caller's.
    if copies.len() >= LIST && takes_lists && unsafe { list(context, current, stream, copies) }? {
        return Ok(());
    }
    let plain = copies.iter().map(|copy| (copy, None));
    // SAFETY: the caller's.
    unsafe { one_by_one(context, current, stream, plain) }
}

/// What the runtime must be told to copy out of some memory: another context of this device, or another
/// device, whose pools' memory it does not find by the address.
fn peer_of(context: &Context, ptr: DevicePtr, current: &Current<'_>) -> Result<Option<Peer>> {
    match context.check(current.kind_of(ptr, 1))? {
        Some(kind) => context.check(current.peer_of(kind)),
        None => Ok(None),
    }
}

/// Each by itself, with what the runtime must be told of its source.
///
/// # Safety
/// As [`run`]; what is told lives as long as the sources.
unsafe fn one_by_one<'a>(
    context: &Context,
    current: &Current<'_>,
    stream: RawStream,
    copies: impl Iterator<Item = (&'a CopyOp, Option<Peer>)>,
) -> Result<()> {
    for (i, (copy, from)) in copies.enumerate() {
        // SAFETY: the caller's.
        let answer = unsafe { current.copy(copy, from, stream) };
        if let Err(e) = context.check(answer) {
            if i > 0 {
                wait_for(context, current, stream);
            }
            return Err(e);
        }
    }
    Ok(())
}

/// After half a list: the caller may free what the copies use, so they must be done.
fn wait_for(context: &Context, current: &Current<'_>, stream: RawStream) {
    // SAFETY: the stream is the queue's, so live.
    let answer = unsafe { current.synchronize_stream(stream) };
    if context.check(answer).is_err() {
        // Its error is final: nothing runs any more.
        let _ = context.settle();
    }
}

/// Whether the runtime took the list. It may not, for reasons of its own: then nothing of it is under way.
///
/// # Safety
/// As [`run`]; not on the legacy default stream.
unsafe fn list(
    context: &Context,
    current: &Current<'_>,
    stream: RawStream,
    copies: &[CopyOp],
) -> Result<bool> {
    // SAFETY: the caller's.
    let Some(answer) = (unsafe { current.copy_list(copies, stream) }) else {
        return Ok(false);
    };
    if let Err(e) = context.check(answer) {
        if context.has_failed() {
            return Err(e);
        }
        // It will not take the next one either.
        context.no_lists.store(true, Ordering::Relaxed);
        wait_for(context, current, stream);
        return Ok(false);
    }
    Ok(true)
}

/// Whether the host does a copy of page-locked memory.
fn is_between_hosts(context: &Context, copy: &CopyOp, current: &Current<'_>) -> Result<bool> {
    if copy.kind != CopyKind::DeviceToDevice {
        return Ok(true);
    }
    let kind = context.check(current.kind_of(copy.src, 1))?;
    Ok(!matches!(
        kind,
        Some(PointerKind::Device(..) | PointerKind::Managed)
    ))
}
