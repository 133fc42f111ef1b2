//! Who may take part.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use arrow_device_share::{Error, Publisher, PublisherOptions, Subscriber, SubscriberOptions};

use crate::deaths::{numbers, shared};
use crate::two::{Other, role, say};

const OTHER: u32 = 65_534;

#[test]
fn only_this_user_unless_allowed() {
    if let Some(path) = role() {
        let refused = Subscriber::connect(&path);
        assert!(matches!(refused, Err(Error::Refused(_))), "{refused:?}");
        let options = SubscriberOptions::default().with_user(0);
        let mut subscriber = Subscriber::connect_with(&path, options).unwrap();
        match subscriber.next().unwrap() {
            Err(Error::Refused(why)) => say(&why),
            batch => assert_eq!(batch.unwrap().to_host().unwrap(), numbers(1)),
        }
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    {
        let _publisher = Publisher::bind(&path).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can start a process of another user");
        return;
    }
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
    // A copy that the other user can run, wherever this program is.
    let program = folder.path().join("program");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let start = || {
        let mut command = Command::new(&program);
        command.uid(OTHER).current_dir("/");
        let test = "users::only_this_user_unless_allowed";
        Other::of(command, test, path.to_str().unwrap(), Stdio::null())
    };
    let options = PublisherOptions {
        users: vec![12_345],
        ..Default::default()
    };
    let publisher = Publisher::bind_with(&path, options).unwrap();
    let mut refused = start();
    assert!(refused.line().unwrap().contains("user 65534"));
    refused.passed();
    assert_eq!(publisher.stats().died, 0);
    drop(publisher);

    let options = PublisherOptions {
        users: vec![OTHER],
        ..Default::default()
    };
    let publisher = Publisher::bind_with(&path, options).unwrap();
    let allowed = start();
    publisher
        .wait_for_subscribers(1, Duration::from_secs(60))
        .unwrap();
    publisher.send(&shared(1)).unwrap();
    allowed.passed();
}
