//! Lists of copies.

use std::sync::atomic::Ordering;

use super::api::{RawStream, code};
use super::calls::Allocation;
use super::context::Context;
use super::entry::Current;
use super::runtime::{Memory, Peer};
use crate::device::backend::{CopyKind, CopyOp};
use crate::error::{Error, Result};

/// From this many copies on, the library is given the list in one call: about 0.5 us per copy
/// instead of 2.3 us per call, for a few us more (reported for CUDA on H100 and H20; not yet
/// measured by this project).
const LIST: usize = 8;
/// A copy of this many bytes goes by itself: next to its own time that of a call is nothing.
const LARGE: usize = 1 << 20;

/// Gives a list of copies to a stream.
///
/// # Safety
/// As [`RawQueue::copy`](crate::device::RawQueue::copy); the stream is live, or stands for a
/// default stream.
pub(super) unsafe fn run(
    context: &Context,
    stream: RawStream,
    copies: &[CopyOp],
    current: &Current<'_>,
) -> Result<()> {
    if copies
        .iter()
        .any(|copy| copy.bytes == 0 || copy.src.is_null() || copy.dst.is_null())
    {
        return Err(Error::argument("an empty copy, or one from or to null"));
    }
    let peers = peers(context, copies, current)?;
    let fits = |(copy, peer): &(&CopyOp, Option<Peer>)| copy.bytes < LARGE && peer.is_none();
    let (mut list, mut alone): (Vec<_>, Vec<_>) = copies.iter().zip(peers).partition(fits);
    let takes_lists = !stream.is_default() && !context.no_lists.load(Ordering::Relaxed);
    let mut queued = false;
    if takes_lists && list.len() >= LIST {
        let copies: Vec<CopyOp> = list.iter().map(|(copy, _)| **copy).collect();
        // SAFETY: the caller guarantees that memory and stream are live until the copies have
        // completed (see `# Safety`); the stream is no default stream.
        match unsafe { current.copy_list(&copies, stream) } {
            None => {}
            Some(Ok(())) => {
                queued = true;
                list.clear();
            }
            Some(Err(failed)) => {
                let e = context.check(Err(failed));
                // Some of the copies may have been queued.
                wait_for(context, current, stream);
                if !matches!(failed.code, code::INVALID_VALUE | code::NOT_SUPPORTED) {
                    return e;
                }
                // The library does not take lists, or none so long, or none with attributes, which
                // make it read the sources in the stream's order. It will not take the next one
                // either.
                context.no_lists.store(true, Ordering::Relaxed);
            }
        }
    }
    alone.append(&mut list);
    for (copy, from) in alone {
        // SAFETY: the caller guarantees that memory and stream are live until the copies have
        // completed (see `# Safety`); `from` is what `peer_of` returned for the source.
        let answer = unsafe { current.copy(copy, from, stream) };
        if let Err(e) = context.check(answer) {
            if queued {
                wait_for(context, current, stream);
            }
            return Err(e);
        }
        queued = true;
    }
    Ok(())
}

/// Looks up the source of each copy between devices: imported arrays may mix kinds of memory, so
/// another context of this device must be named, and so must another device, since the library does
/// not find memory of its pools by the address.
fn peers(context: &Context, copies: &[CopyOp], current: &Current<'_>) -> Result<Vec<Option<Peer>>> {
    // Most sources lie in one allocation.
    let mut last: Option<Allocation> = None;
    let peer = |copy: &CopyOp| {
        if copy.kind != CopyKind::DeviceToDevice || context.memory != Memory::Device {
            return Ok(None);
        }
        let src = copy.src.address();
        if !last.as_ref().is_some_and(|last| last.range.contains(&src)) {
            last = context.check(current.allocation_of(copy.src, 1))?;
        }
        match &last {
            Some(source) => context.check(current.peer_of(source.kind)),
            None => Ok(None),
        }
    };
    copies.iter().map(peer).collect()
}

/// Waits for a stream after half a list: the caller may free what the copies use, so they must be
/// done.
fn wait_for(context: &Context, current: &Current<'_>, stream: RawStream) {
    // SAFETY: the stream belongs to the queue that runs the list, which keeps it alive.
    let answer = unsafe { current.api().synchronize_stream(stream) };
    if context.check(answer).is_err() {
        // An error of this is final: nothing runs any more.
        let _ = context.settle();
    }
}
