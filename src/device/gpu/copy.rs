//! Lists of copies.

use std::sync::atomic::Ordering;

use super::api::{Failed, RawStream, code};
use super::calls::Allocation;
use super::context::Context;
use super::entry::Current;
use super::jobs::Job;
use super::runtime::{Memory, Peer, PointerKind};
use super::shared::Shared;
use crate::device::backend::{CopyKind, CopyOp};
use crate::error::{Error, Result};

/// From this many copies on, the library is given the list in one call: about 0.5 us per copy
/// instead of 2.3 us per call, for a few us more (reported for CUDA on H100 and H20; not yet
/// measured by this project).
const LIST: usize = 8;
/// The most copies of one list. A list of more than 8,192 is reported to end the process (HIP
/// 7.15).
const LONGEST_LIST: usize = 4096;
/// A copy of this many bytes goes by itself: next to its own time that of a call is nothing.
const LARGE: usize = 1 << 20;

/// Gives a list of copies to a stream.
///
/// # Safety
/// As [`RawQueue::copy`](crate::device::RawQueue::copy); the stream is live, or stands for a
/// default stream.
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
        // Between host memories the library would copy at once, on this thread, after waiting for
        // the stream.
        let (mut host, mut device) = (Vec::new(), Vec::new());
        for copy in copies {
            match is_between_hosts(context, copy, current)? {
                true => host.push(*copy),
                false => device.push(*copy),
            }
        }
        let plain = device.iter().map(|copy| (copy, None));
        // SAFETY: the caller guarantees that memory and stream are live until the copies have
        // completed (see `# Safety`).
        unsafe { one_by_one(context, current, stream, plain) }?;
        if host.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller guarantees that memory and stream are live until the copies have
        // completed, and that ranges do not overlap (see `# Safety`); these are in host memory on
        // both sides.
        let queued = unsafe { context.queue_job(current, stream, Job::Copy(host)) };
        if queued.is_err() && !device.is_empty() {
            wait_for(context, current, stream);
        }
        return queued;
    }
    // Imported arrays may mix kinds of memory, so the source of each copy between devices is looked
    // up: another context of this device must be named, and so must another device, since the
    // library does not find memory of its pools by the address.
    let (mut plain, mut named) = (Vec::new(), Vec::new());
    if copies
        .iter()
        .any(|copy| copy.kind == CopyKind::DeviceToDevice)
    {
        // Most sources lie in one allocation.
        let mut last: Option<Allocation> = None;
        for copy in copies {
            let src = copy.src.address();
            let kind = match &last {
                _ if copy.kind != CopyKind::DeviceToDevice => None,
                Some(last) if last.range.contains(&src) => Some(last.kind),
                _ => {
                    last = context.check(current.allocation_of(copy.src, 1))?;
                    last.as_ref().map(|source| source.kind)
                }
            };
            let from = kind.map_or(Ok(None), |kind| current.peer_of(kind));
            match context.check(from)? {
                None => plain.push(*copy),
                from => named.push((copy, from)),
            }
        }
    }
    let plain = if named.is_empty() { copies } else { &plain };
    // SAFETY: the caller guarantees that memory and stream are live until the copies have completed
    // (see `# Safety`).
    unsafe { plain_copies(context, current, stream, plain) }?;
    // SAFETY: the caller guarantees that memory and stream are live until the copies have completed
    // (see `# Safety`); each copy comes with what `peer_of` returned for its source.
    let done = unsafe { one_by_one(context, current, stream, named.into_iter()) };
    if done.is_err() && !plain.is_empty() {
        wait_for(context, current, stream);
    }
    done
}

/// Runs copies whose direction the library finds by their addresses.
///
/// # Safety
/// As [`run`].
unsafe fn plain_copies(
    context: &Context,
    current: &Current<'_>,
    stream: RawStream,
    copies: &[CopyOp],
) -> Result<()> {
    let is_large = |copy: &&CopyOp| copy.bytes >= LARGE;
    // The legacy default stream takes no lists.
    let small = copies.len() - copies.iter().filter(is_large).count();
    if small < LIST || stream.is_legacy() || context.no_lists.load(Ordering::Relaxed) {
        let plain = copies.iter().map(|copy| (copy, None));
        // SAFETY: the caller guarantees that memory and stream are live until the copies have
        // completed (see `# Safety`).
        return unsafe { one_by_one(context, current, stream, plain) };
    }
    let (large, small): (Vec<CopyOp>, Vec<CopyOp>) = copies.iter().partition(is_large);
    let lists = small.chunks(LONGEST_LIST);
    for (done, list) in large.chunks(1).chain(lists).enumerate() {
        // SAFETY: the caller guarantees that memory and stream are live until the copies have
        // completed (see `# Safety`); the stream is not the legacy default one.
        if let Err(e) = unsafe { one_list(context, current, stream, list) } {
            if done > 0 {
                wait_for(context, current, stream);
            }
            return Err(e);
        }
    }
    Ok(())
}

/// Runs copies as one list, or each by itself if there are few or the library takes no lists.
///
/// # Safety
/// As [`run`]; the stream is not the legacy default one.
unsafe fn one_list(
    context: &Context,
    current: &Current<'_>,
    stream: RawStream,
    copies: &[CopyOp],
) -> Result<()> {
    if copies.len() >= LIST && !context.no_lists.load(Ordering::Relaxed) {
        // SAFETY: the caller guarantees that memory and stream are live until the copies have
        // completed, and that the stream is not the legacy default one (see `# Safety`).
        match unsafe { current.copy_list(copies, stream) } {
            None => {}
            Some(Ok(())) => return Ok(()),
            Some(Err(failed)) => {
                let e = context.check(Err(failed));
                if !context.has_failed() {
                    // Some of the copies may have been queued.
                    wait_for(context, current, stream);
                }
                if !is_refusal(failed) || context.has_failed() {
                    return e;
                }
                // The library does not take lists, or none so long, or none with attributes, which
                // make it read the sources in the stream's order. It will not take the next one
                // either.
                context.no_lists.store(true, Ordering::Relaxed);
            }
        }
    }
    let plain = copies.iter().map(|copy| (copy, None));
    // SAFETY: the caller guarantees that memory and stream are live until the copies have completed
    // (see `# Safety`).
    unsafe { one_by_one(context, current, stream, plain) }
}

/// Whether a list was refused as such: the copies of one that failed otherwise would fail too.
fn is_refusal(failed: Failed) -> bool {
    matches!(failed.code, code::INVALID_VALUE | code::NOT_SUPPORTED)
}

/// Runs each copy by itself, naming its source's context or device where the library needs it.
///
/// # Safety
/// As [`run`]; each peer is what `peer_of` returned for the copy's source.
unsafe fn one_by_one<'a>(
    context: &Context,
    current: &Current<'_>,
    stream: RawStream,
    copies: impl Iterator<Item = (&'a CopyOp, Option<Peer>)>,
) -> Result<()> {
    for (i, (copy, from)) in copies.enumerate() {
        // SAFETY: the caller guarantees that memory and stream are live until the copies have
        // completed, and that `from` belongs to the source (see `# Safety`).
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

/// Waits for a stream after half a list: the caller may free what the copies use, so they must be
/// done.
fn wait_for(context: &Context, current: &Current<'_>, stream: RawStream) {
    // SAFETY: the stream belongs to the queue that runs the list, which keeps it alive.
    let answer = unsafe { current.synchronize_stream(stream) };
    if context.check(answer).is_err() {
        // An error of this is final: nothing runs any more.
        let _ = context.settle();
    }
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
